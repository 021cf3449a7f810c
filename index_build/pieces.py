"""One build in pieces that any process of a cluster can do: prefill of some layers, index of some heads of a layer.

Pieces hand over by files in the store (see `csattn/artifact/handover.py`). Each may be done again at any time: what it
finds done it leaves alone, and what two do at once comes out the same to the bit. Together they make the artifact that
`build_artifact` makes.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import ArtifactSpec, WorkDir
from csattn.artifact.handover import (
    drop_handover,
    has_shard,
    is_captured,
    load_captured,
    load_shards,
    save_captured,
    save_shard,
)
from csattn.errors import ArtifactError, ArtifactMismatchError
from csattn.models import LoadedModel
from index_build.batch import prepare
from index_build.capture import prefill
from index_build.job_list import Job
from index_build.kmeans import set_kmeans_threads
from index_build.layer import as_layer_index, index_arrays
from index_build.outbox import make_outbox
from index_build.pipeline import CheckpointClock, fit_next_query, library_versions, make_spec

# Of a piece of index work: rows of queries, over all its heads. Below, starting the piece and joining its result cost
# more than they give (bench/README.md).
_PIECE_ROWS = 2**17


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job's artifact will be, and what its manifest will say."""

    spec: ArtifactSpec
    token_ids: NDArray[np.int32]  # [context_len]
    notes: Mapping[str, Any]
    versions: Mapping[str, Any]


def make_plan(job: Job, loaded: LoadedModel, device: str) -> Plan:
    """Read the job's context. device: where the prefill will run; the index is made on CPUs."""
    token_ids, config, notes = prepare(job, loaded, "cpu")
    return Plan(
        make_spec(loaded, token_ids, config), token_ids, notes, {**library_versions(loaded.device), "device": device}
    )


def head_groups(spec: ArtifactSpec, heads_per_piece: int | None = None) -> list[range]:
    """KV heads of a layer that are indexed together, so many that a piece is worth its start."""
    rows_per_head = spec.context_len * spec.model.num_q_heads // spec.model.num_kv_heads
    size = heads_per_piece or max(1, round(_PIECE_ROWS / rows_per_head))
    num_pieces = -(-spec.model.num_kv_heads // size)
    bounds = [number * spec.model.num_kv_heads // num_pieces for number in range(num_pieces + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def prefill_layers(
    loaded: LoadedModel,
    plan: Plan,
    store: Path,
    stop_layer: int,
    on_rows: Callable[[int, int], None] = lambda layer_idx, num_rows: None,  # rows more of that layer
) -> int:
    """Hand over the layers up to `stop_layer`, from the last checkpoint on; how many were not there before."""
    spec, work = plan.spec, _work_dir(store, plan.spec)
    if loaded.fingerprint != spec.model_fingerprint:
        raise ArtifactMismatchError(
            f"the model {loaded.name} has fingerprint {loaded.fingerprint} here and {spec.model_fingerprint} where the "
            "build began; let every node have the same model"
        )
    num_new, on_gpu = 0, loaded.device.type == "cuda"
    clock = CheckpointClock(on_gpu)
    token_ids = torch.from_numpy(np.array(plan.token_ids)).long()
    layers = prefill(loaded.model, token_ids, resume=work.load_checkpoint(_count_ready(work)), on_chunk=on_rows)
    with make_outbox(loaded.device) as outbox:
        for capture, leaving in layers:
            layer_idx, is_last = capture.layer_idx, capture.layer_idx + 1 == stop_layer
            hidden = leaving.cpu() if clock.is_due() or is_last else None
            if not is_ready(work, layer_idx):
                num_new += 1
                next_query = fit_next_query(loaded.model, capture, leaving)
                outbox.take_kv(capture.kv)
                q = capture.q.clone() if on_gpu else capture.q  # it is copied while the next layer is computed
                outbox.send({"q": q}, partial(_hand_over, work, layer_idx, next_query, hidden))
            elif hidden is not None:
                work.save_checkpoint(layer_idx + 1, hidden)
            if is_last:
                layers.close()
    return num_new


def index_heads(spec: ArtifactSpec, store: Path, layer_idx: int, heads: range, num_threads: int) -> bool:
    """Make the index of those KV heads, and finish the layer if they are all; False when that was done before."""
    work, num_heads = _work_dir(store, spec), spec.model.num_kv_heads
    if work.finished_layer(layer_idx) is not None or has_shard(work, layer_idx, heads):
        return False
    captured = load_captured(work, layer_idx)
    group_size = spec.model.num_q_heads // num_heads
    q = captured.q[heads.start * group_size : heads.stop * group_size]
    set_kmeans_threads(1)
    with ThreadPoolExecutor(num_threads) as threads:
        arrays = index_arrays(q, captured.kv[heads.start : heads.stop], spec.index_config, threads)
    if len(heads) == num_heads:
        index = as_layer_index(arrays, spec.index_config, spec.context_len, captured.next_query)
        work.finish_layer(layer_idx, captured.kv_record, index)
        drop_handover(work, layer_idx)
    else:
        save_shard(work, layer_idx, heads, arrays)
    return True


def join_layer(spec: ArtifactSpec, store: Path, layer_idx: int, groups: list[range]) -> bool:
    """Finish a layer all of whose heads have been indexed; False when that was done before."""
    work = _work_dir(store, spec)
    if work.finished_layer(layer_idx) is not None:
        return False
    captured = load_captured(work, layer_idx)
    arrays = load_shards(work, layer_idx, groups)
    index = as_layer_index(arrays, spec.index_config, spec.context_len, captured.next_query)
    work.finish_layer(layer_idx, captured.kv_record, index)
    drop_handover(work, layer_idx)
    return True


def is_ready(work: WorkDir, layer_idx: int) -> bool:
    """Whether a layer needs no prefill."""
    return is_captured(work, layer_idx) or work.finished_layer(layer_idx) is not None


def _count_ready(work: WorkDir) -> int:
    """How many layers from the first on need no prefill."""
    num_layers = work.spec.model.num_layers
    return next((layer_idx for layer_idx in range(num_layers) if not is_ready(work, layer_idx)), num_layers)


def _hand_over(
    work: WorkDir,
    layer_idx: int,
    next_query: NDArray[np.float32] | None,
    hidden: Tensor | None,
    arrays: Mapping[str, Tensor],
) -> None:
    save_captured(work, layer_idx, arrays["q"], arrays["kv"], next_query)
    if hidden is not None:
        work.save_checkpoint(layer_idx + 1, hidden)


def _work_dir(store: Path, spec: ArtifactSpec) -> WorkDir:
    work = WorkDir(store, spec)
    if not work.parts.is_dir():
        raise ArtifactError(
            f"{work.path} is not there on this node; give a store that every node sees under the same path"
        )
    return work
