"""The directory in which an artifact is made, `<store>/.building-<id>/`:

    artifact/            the files of the artifact, renamed to `<store>/<id>` when all are there
    layer-000.json ...   what each finished layer's files must be; without it a layer counts as absent
    checkpoint.json      where the prefill goes on, and what the hidden state's file must be

and, where prefill and index are made apart, what `handover.py` puts there. Every file is written aside, flushed and
renamed. The holder of the artifact's lock decides what is made; other processes may write for it, since two
writers of one file write the same bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord, store_errors, write_bytes
from csattn.artifact.layout import (
    fault_of_index,
    index_arrays,
    index_file,
    layer_files,
    next_query_arrays,
    plan,
)
from csattn.artifact.manifest import ArtifactSpec, canonical_json
from csattn.artifact.reader import has_hash, hash_file
from csattn.artifact.tensor_file import FileLayout, TensorSpec, map_file, plan_file, write_file
from csattn.errors import ArtifactError
from csattn.index import LayerIndex, NoIndex
from csattn.sketch import SketchIndex

BUILDING_PREFIX = ".building-"
LOCK_SUFFIX = ".lock"
CHECKPOINT_FILE = "checkpoint.json"

_CHECKPOINT_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class WorkDir:
    """What has been made of one artifact so far."""

    def __init__(self, store: Path, spec: ArtifactSpec):
        self.spec = spec
        self.store = store
        self.path = store / f"{BUILDING_PREFIX}{spec.artifact_id}"
        self.parts = self.path / "artifact"

    def write_part(self, name: str, arrays: Mapping[str, NDArray[Any] | torch.Tensor]) -> FileRecord:
        """Write a file of the artifact."""
        return write_file(self.parts / name, plan(self.spec, name), arrays)

    def finish_layer(self, layer_idx: int, kv_record: FileRecord, index: LayerIndex | SketchIndex | NoIndex) -> None:
        """Write the index of a layer whose KV or state is there, and with it the layer's record."""
        if fault := fault_of_index(index):
            raise ArtifactError(f"the index of layer {layer_idx} cannot be stored: {fault}; nothing was published")
        records, arrays = (
            {next(layer_files(self.spec, layer_idx)): kv_record},
            {**index_arrays(index), **next_query_arrays(index.next_query)},
        )
        if arrays:
            records[index_file(layer_idx)] = self.write_part(index_file(layer_idx), arrays)
        write_record(self.layer_record(layer_idx), files_to_json(records))

    def finished_layer(self, layer_idx: int) -> dict[str, FileRecord] | None:
        """The files of a finished layer as its record has them, unread; None when it is not finished."""
        records = files_from_json(read_record(self.layer_record(layer_idx)))
        return records if records.keys() == set(layer_files(self.spec, layer_idx)) else None

    def intact_layer(self, layer_idx: int) -> dict[str, FileRecord] | None:
        """The same, with every byte hashed."""
        records = self.finished_layer(layer_idx)
        return records if records is not None and self.is_intact(records) else None

    def is_intact(self, records: Mapping[str, FileRecord]) -> bool:
        """Whether files of the artifact are what their records say."""
        try:
            for name, wanted in records.items():
                if hash_file(self.parts / name) != wanted.sha256:
                    return False
                map_file(self.parts / name, plan(self.spec, name))
        except (OSError, ArtifactError):
            return False
        return True

    def save_checkpoint(self, next_layer: int, hidden: torch.Tensor) -> None:
        """Remember the hidden state [context_len, hidden_size] that enters `next_layer`."""
        name = f"hidden-{next_layer:03d}.safetensors"
        dtype, shape = _CHECKPOINT_DTYPES[hidden.dtype], tuple(hidden.shape)
        record = write_file(self.path / name, _checkpoint_layout(dtype, shape), {"hidden": hidden})
        write_record(
            self.path / CHECKPOINT_FILE,
            {"next_layer": next_layer, "file": name, "dtype": dtype, "shape": shape, **record.to_json()},
        )
        with store_errors(f"remove an old checkpoint in {self.path}", self.store):
            for other in self.path.glob("hidden-*.safetensors"):
                if other.name != name:
                    other.unlink(missing_ok=True)

    def load_checkpoint(self, num_ready_layers: int) -> tuple[int, torch.Tensor] | None:
        """The layer to go on with and the hidden state that enters it, or None to start from the first."""
        record = self.intact_checkpoint(num_ready_layers)
        if record is None:
            return None
        layout = _checkpoint_layout(record["dtype"], tuple(record["shape"]))
        array = map_file(self.path / record["file"], layout)["hidden"]
        hidden = torch.from_numpy(np.array(array))  # a copy: the file goes with the next checkpoint
        return record["next_layer"], hidden.view(torch.bfloat16) if record["dtype"] == "BF16" else hidden

    def intact_checkpoint(self, num_ready_layers: int) -> dict[str, Any] | None:
        """The checkpoint's record, unless its file is altered or it skips layers that are not there."""
        record = read_record(self.path / CHECKPOINT_FILE)
        if record is None or record["next_layer"] > num_ready_layers:
            return None
        return record if has_hash(self.path / record["file"], record["sha256"]) else None

    def layer_record(self, layer_idx: int) -> Path:
        return self.path / f"layer-{layer_idx:03d}.json"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a small JSON object with its own hash, durably."""
    body = canonical_json(record)
    write_bytes(path, body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """What `write_record` wrote, or None for anything else."""
    try:
        body, _, digest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return None
    record: dict[str, Any] = json.loads(body)
    return record


def files_to_json(records: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {"files": {name: record.to_json() for name, record in records.items()}}


def files_from_json(record: dict[str, Any] | None) -> dict[str, FileRecord]:
    """What each file must be; nothing when there is no record."""
    return {} if record is None else {name: FileRecord(**value) for name, value in record["files"].items()}


def remove_others(directory: Path, kept: set[str]) -> None:
    """Remove everything in a directory but what is named."""
    for entry in directory.iterdir():
        if entry.name not in kept:
            remove(entry)


def remove(path: Path) -> None:
    """Remove a file or a whole directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def num_bytes_below(path: Path) -> int:
    """Of the files of a directory that others may be removing: of those that are left."""
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def used_at(path: Path) -> float:
    """When an artifact was last used, in seconds since the epoch; 0 where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _checkpoint_layout(dtype: str, shape: tuple[int, ...]) -> FileLayout:
    return plan_file([TensorSpec("hidden", dtype, shape)], {})
