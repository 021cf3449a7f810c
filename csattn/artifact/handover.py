"""Layers on their way from prefill to index, as files in the directory in which an artifact is made:

    artifact/layer-000.kv...      the layer's KV, already where it belongs
    queries-000.safetensors       its queries, and the predictor of the next layer's
    captured-000.json             what both files must be; without it nothing was handed over

Queries go when the layer is finished.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact.durable import FileRecord
from csattn.artifact.layout import KV_DTYPES, kv_file, next_query_arrays, next_query_tensors, plan, take_next_query
from csattn.artifact.reader import as_tensor
from csattn.artifact.tensor_file import FileLayout, TensorSpec, map_file, plan_file, write_file
from csattn.artifact.work import WorkDir, files_from_json, files_to_json, is_as_written, read_record, write_record
from csattn.errors import ArtifactCorruptError, ArtifactError


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer as the prefill left it, mapped from its files: not to be written to."""

    q: torch.Tensor  # [num_q_heads, context_len, head_dim], after RoPE
    kv: torch.Tensor  # [num_kv_heads, context_len, 2, head_dim]
    next_query: NDArray[np.float32] | None  # see `LayerIndex.next_query`
    kv_record: FileRecord


def save_captured(
    work: WorkDir, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, next_query: NDArray[np.float32] | None
) -> None:
    """Hand a layer over."""
    arrays: dict[str, NDArray[Any] | torch.Tensor] = {"q": q}
    arrays |= next_query_arrays(next_query)
    records = {
        kv_file(layer_idx): work.write_part(kv_file(layer_idx), {"kv": kv}),
        _queries_file(layer_idx): write_file(
            work.path / _queries_file(layer_idx), _queries_layout(work, layer_idx), arrays
        ),
    }
    write_record(work.path / _captured_record(layer_idx), files_to_json(records))


def is_captured(work: WorkDir, layer_idx: int) -> bool:
    """Whether the layer was handed over and is not yet finished."""
    return (work.path / _captured_record(layer_idx)).exists()


def load_captured(work: WorkDir, layer_idx: int) -> Captured:
    """Take a layer. Raises ArtifactError when it is not there."""
    records = files_from_json(read_record(work.path / _captured_record(layer_idx)))
    if records.keys() != {kv_file(layer_idx), _queries_file(layer_idx)}:
        raise ArtifactCorruptError(
            f"layer {layer_idx} was not handed over in {work.path}; give a store that every node sees under one path"
        )
    try:
        rows = kv_file(work.spec.model.lender(layer_idx))
        kv = map_file(work.parts / rows, plan(work.spec, rows))["kv"]
        own = map_file(work.path / _queries_file(layer_idx), _queries_layout(work, layer_idx))
    except OSError as error:
        raise ArtifactError(f"cannot read what was handed over in {work.path}: {error.strerror or error}") from error
    is_bfloat16 = work.spec.kv_dtype == "bfloat16"
    return Captured(
        as_tensor(own["q"], is_bfloat16),
        as_tensor(kv, is_bfloat16),
        take_next_query(own),
        records[kv_file(layer_idx)],
    )


def intact_handover(work: WorkDir, layer_idx: int) -> set[str]:
    """The names in the directory that hold an unfinished layer; empty when a byte of it differs."""
    records = files_from_json(read_record(work.path / _captured_record(layer_idx)))
    queries = records.pop(_queries_file(layer_idx), None)
    if records.keys() != {kv_file(layer_idx)} or not work.is_intact(records):
        return set()
    if not is_as_written(work.path / _queries_file(layer_idx), _queries_layout(work, layer_idx), queries):
        return set()
    return {_captured_record(layer_idx), _queries_file(layer_idx)}


def drop_handover(work: WorkDir, layer_idx: int) -> None:
    """Remove what a finished layer no longer needs."""
    with suppress(OSError):  # the next builder removes what is left
        for name in (_captured_record(layer_idx), _queries_file(layer_idx)):
            (work.path / name).unlink(missing_ok=True)


def _captured_record(layer_idx: int) -> str:
    return f"captured-{layer_idx:03d}.json"


def _queries_file(layer_idx: int) -> str:
    return f"queries-{layer_idx:03d}.safetensors"


def _queries_layout(work: WorkDir, layer_idx: int) -> FileLayout:
    spec = work.spec
    tensors = [
        TensorSpec("q", KV_DTYPES[spec.kv_dtype], (spec.model.num_q_heads, spec.context_len, spec.model.head_dim))
    ]
    if spec.model.is_predicted(layer_idx + 1):
        tensors += next_query_tensors(spec)
    return plan_file(tensors, {"artifact_id": spec.artifact_id, "file": _queries_file(layer_idx)})
