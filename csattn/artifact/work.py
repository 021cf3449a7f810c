"""The work directory of a build, `<store>/.building-<id>/`:

    artifact/            the artifact's files; renamed to `<store>/<id>` when all are there
    layer-000.json ...   sizes and hashes of a finished layer's files; without it, the layer counts as absent
    checkpoint.json      the layer at which the prefill resumes, with size and hash of the hidden state's file

Every file is written under another name, flushed and renamed, by the holder of the artifact's lock.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.directories import BUILDING_PREFIX
from csattn.artifact.durable import FileRecord, store_errors, write_bytes
from csattn.artifact.layout import (
    KV_DTYPES,
    arrays_from_index,
    file_layout,
    index_fault,
    index_file,
    layer_files,
    next_query_arrays,
)
from csattn.artifact.manifest import ArtifactSpec, canonical_json
from csattn.artifact.reader import NO_ROOM, ROOM_ADVICE, as_tensor, hash_file
from csattn.artifact.tensor_file import FileLayout, TensorSpec, map_file, plan_file, write_file
from csattn.errors import ArtifactError, ArtifactRoomError
from csattn.index import ListIndex, NoIndex
from csattn.sketch import SketchIndex

CHECKPOINT_FILE = "checkpoint.json"


class WorkDir:
    """The work directory of one artifact: the finished layers and the prefill's checkpoint."""

    def __init__(self, store: Path, spec: ArtifactSpec):
        self.spec = spec
        self.store = store
        self.path = store / f"{BUILDING_PREFIX}{spec.artifact_id}"
        self.parts = self.path / "artifact"

    def write_part(self, name: str, arrays: Mapping[str, NDArray[Any] | torch.Tensor]) -> FileRecord:
        """Write a file of the artifact, by its planned layout."""
        return write_file(self.parts / name, file_layout(self.spec, name), arrays)

    def finish_layer(self, layer_idx: int, kv_record: FileRecord, index: ListIndex | SketchIndex | NoIndex) -> None:
        """Write the index of a layer whose KV or state is written already, then the layer's record."""
        if fault := index_fault(index):
            raise ArtifactError(f"the index of layer {layer_idx} cannot be stored: {fault}; nothing was published")
        records = {next(layer_files(self.spec, layer_idx)): kv_record}
        arrays = arrays_from_index(index) | next_query_arrays(index.next_query)
        if arrays:
            records[index_file(layer_idx)] = self.write_part(index_file(layer_idx), arrays)
        write_record(self.layer_record(layer_idx), files_to_json(records))

    def finished_layer(self, layer_idx: int) -> dict[str, FileRecord] | None:
        """Return the files of a finished layer by its record, without reading them; None if it is not finished."""
        records = files_from_json(read_record(self.layer_record(layer_idx)))
        return records if records.keys() == set(layer_files(self.spec, layer_idx)) else None

    def intact_layer(self, layer_idx: int) -> dict[str, FileRecord] | None:
        """Like `finished_layer`, but None also if the hash of a file differs."""
        records = self.finished_layer(layer_idx)
        for name, record in (records or {}).items():
            if not matches_record(self.parts / name, file_layout(self.spec, name), record):
                return None
        return records

    def save_checkpoint(self, next_layer: int, hidden: torch.Tensor) -> None:
        """Save the hidden state [context_len, hidden_size] that enters `next_layer`, and remove older ones."""
        name = _hidden_file(next_layer)
        record = write_file(self.path / name, self._hidden_layout(), {"hidden": hidden})
        write_record(self.path / CHECKPOINT_FILE, {"next_layer": next_layer, **files_to_json({name: record})})
        with store_errors(f"remove an old checkpoint in {self.path}", self.store):
            for other in self.path.glob("hidden-*.safetensors"):
                if other.name != name:
                    other.unlink(missing_ok=True)

    def load_checkpoint(self, num_ready_layers: int) -> tuple[int, torch.Tensor] | None:
        """Return the layer to resume at and the hidden state that enters it; None to start from the first."""
        found = self.intact_checkpoint(num_ready_layers)
        if found is None:
            return None
        next_layer, name = found
        array = map_file(self.path / name, self._hidden_layout())["hidden"]
        hidden = np.array(array)  # a copy: the next checkpoint removes the file
        return next_layer, as_tensor(hidden, self.spec.kv_dtype == "bfloat16")

    def intact_checkpoint(self, num_ready_layers: int) -> tuple[int, str] | None:
        """Return the layer to resume at and its file; None if that is altered or an earlier layer is not ready."""
        record = read_record(self.path / CHECKPOINT_FILE) or {}
        next_layer = record.get("next_layer")
        if type(next_layer) is not int or not 0 <= next_layer <= num_ready_layers:
            return None
        name = _hidden_file(next_layer)
        file_record = files_from_json(record).get(name)
        return (next_layer, name) if matches_record(self.path / name, self._hidden_layout(), file_record) else None

    def _hidden_layout(self) -> FileLayout:
        shape = self.spec.context_len, self.spec.model.hidden_size
        return plan_file([TensorSpec("hidden", KV_DTYPES[self.spec.kv_dtype], shape)], {})

    def layer_record(self, layer_idx: int) -> Path:
        return self.path / f"layer-{layer_idx:03d}.json"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a small JSON object and its hash, durably."""
    body = canonical_json(record)
    write_bytes(path, body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """Read what `write_record` wrote; None for anything else. A forged record may contain anything."""
    try:
        body, _, digest = path.read_bytes().partition(b"\n")
        is_whole = digest == hashlib.sha256(body).hexdigest().encode() + b"\n"
        record = json.loads(body) if is_whole else None
    except OSError as error:
        _require_room(path, error)
        return None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def files_to_json(records: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {"files": {name: asdict(record) for name, record in records.items()}}


def files_from_json(record: dict[str, Any] | None) -> dict[str, FileRecord]:
    """Return the record of each file; empty if there is no record, or one of another form."""
    try:
        return {} if record is None else {name: FileRecord(**value) for name, value in record["files"].items()}
    except (AttributeError, KeyError, TypeError):
        return {}


def matches_record(path: Path, layout: FileLayout, record: FileRecord | None) -> bool:
    """Whether a file has this layout, and the size and hash in its record."""
    try:
        map_file(path, layout)
        return FileRecord(layout.size_bytes, hash_file(path)) == record
    except OSError as error:
        _require_room(path, error)
        return False
    except ArtifactError:
        return False


def _require_room(path: Path, error: OSError) -> None:
    """Raise ArtifactRoomError if a file could not be read for lack of room: it may be intact, and has to stay."""
    if error.errno in NO_ROOM:
        raise ArtifactRoomError(f"{path} cannot be checked: {error.strerror}; {ROOM_ADVICE}") from error


def _hidden_file(next_layer: int) -> str:
    return f"hidden-{next_layer:03d}.safetensors"
