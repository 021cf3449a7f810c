"""Build an artifact so that, whatever happens on the way, the store holds it whole or not at all.

Work goes on in `<store>/.building-<id>/`:

    artifact/            the files of the artifact, renamed to `<store>/<id>` when all are there
    layer-000.json ...   what each finished layer's files must be; without it a layer counts as absent
    checkpoint.json      where the pipeline goes on, and what the hidden state's file must be

Every file is written aside, flushed and renamed. Whatever is found there on a later start is hashed before it is
believed, and removed otherwise.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord, fsync_dir, store_errors, write_bytes
from csattn.artifact.layout import (
    MANIFEST_FILE,
    MANIFEST_HASH_FILE,
    TOKENS_FILE,
    artifact_bytes,
    fault_of_index,
    index_arrays,
    index_file,
    kv_file,
    plan,
)
from csattn.artifact.lock import BuildLock
from csattn.artifact.manifest import ArtifactSpec, Manifest, canonical_json, hash_token_ids
from csattn.artifact.reader import hash_file, manifest_hash_line, open_artifact
from csattn.artifact.tensor_file import FileLayout, TensorSpec, map_file, plan_file, write_file
from csattn.errors import ArtifactError
from csattn.index import LayerIndex

BUILDING_PREFIX = ".building-"
LOCK_SUFFIX = ".lock"
CHECKPOINT_FILE = "checkpoint.json"

_CHECKPOINT_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class ArtifactWriter:
    """Builds one artifact, alone, and goes on where an interrupted build stopped.

    with ArtifactWriter(store, spec, token_ids) as writer:
        if writer.finished_path is None:
            start, hidden = writer.load_checkpoint() or (0, embed(token_ids))
            for layer_idx in range(start, spec.model.num_layers):
                hidden, kv, index = ...
                writer.write_layer(layer_idx, kv, index)
                writer.save_checkpoint(layer_idx + 1, hidden)
            writer.finish(library_versions, build_notes)
    artifact = open_artifact(writer.finished_path)
    """

    def __init__(
        self,
        store: Path,
        spec: ArtifactSpec,
        token_ids: NDArray[np.int32],  # [context_len]
        on_wait: Callable[[], None] | None = None,  # called once if another process is building the same artifact
    ):
        assert hash_token_ids(token_ids) == spec.token_ids_sha256, "the spec was made for other tokens"
        self.spec = spec
        self.finished_path: Path | None = None  # the artifact's directory as soon as it is in the store
        self._store = store
        self._token_ids = token_ids
        self._on_wait = on_wait
        self._building = store / f"{BUILDING_PREFIX}{spec.artifact_id}"
        self._target = store / spec.artifact_id
        self._parts = self._building / "artifact"
        self._lock = BuildLock(store / f"{BUILDING_PREFIX}{spec.artifact_id}{LOCK_SUFFIX}")
        self._locked = False
        self._layers: list[dict[str, FileRecord]] = []  # of the finished layers, by file name

    @property
    def finished_layers(self) -> int:
        """Layers 0 to this are on disk and intact."""
        return len(self._layers)

    @property
    def remaining_bytes(self) -> int:
        """What is still to be written of the artifact."""
        done = sum(record.size_bytes for records in self._layers for record in records.values())
        return artifact_bytes(self.spec) - done

    def __enter__(self) -> Self:
        if self._is_published():
            self._tidy_up()
            return self
        with store_errors(f"make the store {self._store}", self._store):
            self._store.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(self._on_wait)
        self._locked = True
        try:
            if self._is_published():  # by the builder that we waited for
                self._discard_work()
            else:
                with store_errors(f"go on building in {self._building}", self._store):
                    self._resume()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def __repr__(self) -> str:
        return f"<ArtifactWriter {self.spec.artifact_id}: {self.finished_layers}/{self.spec.model.num_layers} layers>"

    def write_layer(self, layer_idx: int, kv: torch.Tensor, index: LayerIndex) -> None:
        """Store one layer: kv [num_kv_heads, context_len, 2, head_dim] in the spec's dtype, and its index.

        Layers come in order; one that is already there may be written again.
        """
        assert self._locked and layer_idx <= self.finished_layers, f"{self!r} is not ready for layer {layer_idx}"
        if fault := fault_of_index(index):
            raise ArtifactError(f"the index of layer {layer_idx} cannot be stored: {fault}; nothing was published")
        records = {
            kv_file(layer_idx): self._write(kv_file(layer_idx), {"kv": kv}),
            index_file(layer_idx): self._write(index_file(layer_idx), index_arrays(index)),
        }
        _write_record(
            self._layer_record(layer_idx), {"files": {name: record.to_json() for name, record in records.items()}}
        )
        self._layers[layer_idx : layer_idx + 1] = [records]

    def save_checkpoint(self, next_layer: int, hidden: torch.Tensor) -> None:
        """Remember the hidden state that enters `next_layer`, after the layers before it have been written."""
        assert self._locked and next_layer <= self.finished_layers, f"{self!r} cannot go on at layer {next_layer}"
        name = f"hidden-{next_layer:03d}.safetensors"
        dtype, shape = _CHECKPOINT_DTYPES[hidden.dtype], tuple(hidden.shape)
        record = write_file(self._building / name, _checkpoint_layout(dtype, shape), {"hidden": hidden})
        _write_record(
            self._building / CHECKPOINT_FILE,
            {"next_layer": next_layer, "file": name, "dtype": dtype, "shape": shape, **record.to_json()},
        )
        with store_errors(f"remove an old checkpoint in {self._building}", self._store):
            for other in self._building.glob("hidden-*.safetensors"):
                if other.name != name:
                    other.unlink()

    def load_checkpoint(self) -> tuple[int, torch.Tensor] | None:
        """The layer to go on with and the hidden state that enters it, or None to start from the first."""
        record = self._intact_checkpoint()
        if record is None:
            return None
        layout = _checkpoint_layout(record["dtype"], tuple(record["shape"]))
        array = map_file(self._building / record["file"], layout)["hidden"]
        hidden = torch.from_numpy(np.array(array))  # a copy: the file goes with the next checkpoint
        return record["next_layer"], hidden.view(torch.bfloat16) if record["dtype"] == "BF16" else hidden

    def finish(self, library_versions: Mapping[str, str], build_notes: Mapping[str, Any]) -> Path:
        """Publish the artifact under its id and return its directory. The notes must be JSON."""
        assert self._locked and self.finished_layers == self.spec.model.num_layers, f"{self!r} is not complete"
        files = {TOKENS_FILE: self._write(TOKENS_FILE, {"token_ids": self._token_ids})}
        for records in self._layers:
            files |= records
        manifest = Manifest(
            spec=self.spec, library_versions=library_versions, build_notes=build_notes, files=files
        ).to_bytes()
        write_bytes(self._parts / MANIFEST_FILE, manifest)
        write_bytes(self._parts / MANIFEST_HASH_FILE, manifest_hash_line(manifest))
        with store_errors(f"publish {self._target}", self._store):
            if os.path.lexists(self._target):  # not a good artifact, or we would not be here
                os.rename(self._target, self._building / "replaced")
            os.rename(self._parts, self._target)
            fsync_dir(self._store)
        self.finished_path = self._target
        self._discard_work()
        return self._target

    def _is_published(self) -> bool:
        """Whether the store has this artifact, as far as can be told without reading all of it."""
        try:
            open_artifact(self._target).close()
        except ArtifactError:
            return False
        self.finished_path = self._target
        return True

    def _write(self, name: str, arrays: Mapping[str, NDArray[Any] | torch.Tensor]) -> FileRecord:
        return write_file(self._parts / name, plan(self.spec, name), arrays)

    def _resume(self) -> None:
        """Keep the layers that are intact, remove everything else."""
        if not self._parts.is_dir() or self._building.is_symlink() or self._parts.is_symlink():
            _remove(self._building)
            self._parts.mkdir(parents=True)
        self._layers = []
        while self.finished_layers < self.spec.model.num_layers:
            records = self._intact_layer(self.finished_layers)
            if records is None:
                break
            self._layers.append(records)
        checkpoint = self._intact_checkpoint()
        work = {"artifact", *(self._layer_record(layer_idx).name for layer_idx in range(self.finished_layers))}
        work |= {CHECKPOINT_FILE, checkpoint["file"]} if checkpoint is not None else set()
        _remove_others(self._building, work)
        _remove_others(self._parts, {name for records in self._layers for name in records})

    def _intact_layer(self, layer_idx: int) -> dict[str, FileRecord] | None:
        record = _read_record(self._layer_record(layer_idx))
        if record is None:
            return None
        records = {name: FileRecord(**value) for name, value in record["files"].items()}
        if set(records) != {kv_file(layer_idx), index_file(layer_idx)}:
            return None
        try:
            for name, wanted in records.items():
                if hash_file(self._parts / name) != wanted.sha256:
                    return None
                map_file(self._parts / name, plan(self.spec, name))
        except (OSError, ArtifactError):
            return None
        return records

    def _intact_checkpoint(self) -> dict[str, Any] | None:
        record = _read_record(self._building / CHECKPOINT_FILE)
        if record is None or record["next_layer"] > self.finished_layers:
            return None
        try:
            return record if hash_file(self._building / record["file"]) == record["sha256"] else None
        except (OSError, ArtifactError):
            return None

    def _layer_record(self, layer_idx: int) -> Path:
        return self._building / f"layer-{layer_idx:03d}.json"

    def _discard_work(self) -> None:
        """Remove the building directory; what cannot be removed is left to `collect_garbage`."""
        shutil.rmtree(self._building, ignore_errors=True)

    def _tidy_up(self) -> None:
        """Remove what a builder left that was killed between publishing and clearing up."""
        if self._building.exists() or self._lock.exists():
            with suppress(ArtifactError):  # a store that may only be read, say
                self._locked = self._lock.try_acquire()
                if self._locked:
                    self._discard_work()
                    self._release()

    def _release(self) -> None:
        if self._locked:
            self._locked = False
            with suppress(OSError):
                self._lock.release()


def _checkpoint_layout(dtype: str, shape: tuple[int, ...]) -> FileLayout:
    return plan_file([TensorSpec("hidden", dtype, shape)], {})


def _write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a small JSON object with its own hash, durably."""
    body = canonical_json(record)
    write_bytes(path, body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


def _read_record(path: Path) -> dict[str, Any] | None:
    """What `_write_record` wrote, or None for anything else."""
    try:
        body, _, digest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return None
    record: dict[str, Any] = json.loads(body)
    return record


def _remove_others(directory: Path, kept: set[str]) -> None:
    for entry in directory.iterdir():
        if entry.name not in kept:
            _remove(entry)


def _remove(path: Path) -> None:
    """Remove a file or a whole directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
