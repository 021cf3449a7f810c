"""Build an artifact atomically: whatever happens on the way, the store has it whole or not at all.

A build works in `<store>/.building-<id>/`, see `work.py`. A later start hashes what it finds there before it trusts it,
and removes the rest.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from csattn.artifact.directories import BUILDING_PREFIX, lock_of, remove, remove_except
from csattn.artifact.durable import (
    FileRecord,
    fsync_dir,
    fsync_files,
    make_store,
    require_space,
    store_errors,
    write_bytes,
)
from csattn.artifact.find import require_place_for_store
from csattn.artifact.layout import MANIFEST_FILE, MANIFEST_HASH_FILE, TOKENS_FILE, artifact_bytes, file_names
from csattn.artifact.manifest import ArtifactSpec, Manifest, hash_token_ids
from csattn.artifact.reader import is_whole, manifest_hash_line
from csattn.artifact.work import CHECKPOINT_FILE, WorkDir
from csattn.errors import ArtifactError, StoreFullError


class ArtifactWriter:
    """Builds one artifact under an exclusive lock, and resumes an interrupted build.

    with ArtifactWriter(store, spec, token_ids) as writer:
        if writer.finished_path is None:
            for layer_idx in range(writer.finished_layers, spec.model.num_layers):
                kv, index = ...
                kv_record = writer.work.write_part(kv_file(layer_idx), {"kv": kv})
                writer.work.finish_layer(layer_idx, kv_record, index)
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
        self.finished_path: Path | None = None  # the artifact's directory, once it is in the store
        self.work = WorkDir(store, spec)
        self._store = store
        self._token_ids = token_ids
        self._on_wait = on_wait
        self._target = store / spec.artifact_id
        self._lock = lock_of(store / f"{BUILDING_PREFIX}{spec.artifact_id}")
        self._locked = False
        self._layers: dict[int, dict[str, FileRecord]] = {}  # of the finished layers, by file name

    @property
    def finished_layers(self) -> int:
        """The number of finished layers in sequence from layer 0: all layers before this one are on disk and intact."""
        return next(number for number in range(len(self._layers) + 1) if number not in self._layers)

    @property
    def remaining_bytes(self) -> int:
        """Bytes of the artifact that are still to be written."""
        done = sum(record.size_bytes for records in self._layers.values() for record in records.values())
        return artifact_bytes(self.spec) - done

    def __enter__(self) -> Self:
        if self._is_published():
            self._tidy_up()
            return self
        require_place_for_store(self._store)
        make_store(self._store)
        self._lock.acquire(self._on_wait)
        self._locked = True
        try:
            if self._is_published():  # the builder we waited for did it
                self._discard_work()
            else:
                with store_errors(f"continue the build in {self.work.path}", self._store):
                    self._resume()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._release()

    def __repr__(self) -> str:
        return f"<ArtifactWriter {self.spec.artifact_id}: {self.finished_layers}/{self.spec.model.num_layers} layers>"

    def require_space(self) -> None:
        """Raise StoreFullError if the store has no room for the rest, and remove a build that has not begun."""
        try:
            require_space(self._store, self.remaining_bytes)
        except StoreFullError:
            with suppress(OSError):
                if os.listdir(self.work.path) == [self.work.parts.name]:
                    self.work.parts.rmdir()
                    self.work.path.rmdir()
            raise

    def finish(self, library_versions: Mapping[str, str], build_notes: Mapping[str, Any]) -> Path:
        """Publish the artifact under its id by a rename, and return its directory. The notes must be JSON."""
        for layer_idx in range(self.spec.model.num_layers):
            if (records := self.work.finished_layer(layer_idx)) is not None:
                self._layers[layer_idx] = records
        assert self._locked and self.finished_layers == self.spec.model.num_layers, f"{self!r} is not complete"
        files = {TOKENS_FILE: self.work.write_part(TOKENS_FILE, {"token_ids": self._token_ids})}
        for layer_idx in range(self.finished_layers):
            files |= self._layers[layer_idx]
        with store_errors(f"clear up {self.work.parts}", self._store):
            remove_except(self.work.parts, set(files))  # a lost worker may have left half a file
        files = {name: files[name] for name in file_names(self.spec)}  # in the order of an uninterrupted build
        manifest = Manifest(
            spec=self.spec, library_versions=library_versions, build_notes=build_notes, files=files
        ).to_bytes()
        write_bytes(self.work.parts / MANIFEST_FILE, manifest)
        write_bytes(self.work.parts / MANIFEST_HASH_FILE, manifest_hash_line(manifest))
        with store_errors(f"publish {self._target}", self._store):
            if os.path.lexists(self._target):  # not a good artifact, or we would not be here
                os.rename(self._target, self.work.path / "replaced")
            os.rename(self.work.parts, self._target)
            fsync_dir(self._store)
        self.finished_path = self._target
        self._discard_work()
        return self._target

    def _is_published(self) -> bool:
        if not is_whole(self._target):
            return False
        self.finished_path = self._target
        return True

    def _resume(self) -> None:
        """Keep intact layers and the checkpoint; remove everything else."""
        work = self.work
        if not work.parts.is_dir() or work.path.is_symlink() or work.parts.is_symlink():
            remove(work.path)
            work.parts.mkdir(parents=True)
        kept, kept_parts = {"artifact"}, set[str]()
        self._layers = {}
        for layer_idx in range(self.spec.model.num_layers):
            if (records := work.intact_layer(layer_idx)) is not None:
                self._layers[layer_idx] = records
                kept.add(work.layer_record(layer_idx).name)
                kept_parts |= records.keys()
        checkpoint = work.intact_checkpoint(self.finished_layers)
        kept |= {CHECKPOINT_FILE, checkpoint[1]} if checkpoint is not None else set()
        remove_except(work.path, kept)
        remove_except(work.parts, kept_parts)
        if kept_parts:
            fsync_files(work.parts)  # the earlier build may have been `unsynced`

    def _discard_work(self) -> None:
        """Remove the building directory; what cannot be removed is left to `collect_garbage`."""
        shutil.rmtree(self.work.path, ignore_errors=True)

    def _tidy_up(self) -> None:
        """Remove what a builder left if it was killed between publishing and cleaning up."""
        if self.work.path.exists() or self._lock.exists():
            with suppress(ArtifactError):  # a read-only store, for example
                self._locked = self._lock.try_acquire()
                if self._locked:
                    self._discard_work()
                    self._release()

    def _release(self) -> None:
        if self._locked:
            self._locked = False
            with suppress(OSError):
                self._lock.release()
