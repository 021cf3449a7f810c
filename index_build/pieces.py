"""The pieces of a build, each of which any process can do: layers as a whole, or prefill and index apart.

Prefill and index made apart hand over by files in the store (see `csattn/artifact/handover.py`). A piece may be done
again at any time: it leaves alone what it finds done, and what two processes do at once comes out the same to the bit.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import ArtifactSpec, RemoteStore, WorkDir
from csattn.artifact.durable import FileRecord
from csattn.artifact.handover import drop_handover, is_captured, load_captured, save_captured
from csattn.artifact.layout import artifact_bytes, index_from_arrays, kv_file, state_file
from csattn.config import IndexConfig
from csattn.errors import ArtifactError, ArtifactMismatchError
from csattn.models import LoadedModel
from csattn.models.lending import lent
from csattn.models.query import PROJECTS_QUERIES, queries_before_rope
from csattn.torch_threads import alone, threads_kept
from index_build.layer import index_arrays
from index_build.outbox import make_outbox
from index_build.plan import Plan
from index_build.predictor import fit_predictor, sample_rows

if TYPE_CHECKING:  # transformers comes with it, which takes seconds: an index is made without
    from index_build.capture import LayerCapture

# On a GPU a layer takes less time than its hidden states take to be written: not every layer gets a checkpoint.
_CHECKPOINT_EVERY_S, _CHECKPOINT_EVERY_S_ON_GPU = 0.0, 60.0
# of a fit, in the time that an index takes for each number of its keys, each by one thread
_PRODUCTS_BESIDE = 1000

Fit = Callable[[], dict[str, Tensor]]  # what `_fit_query` gives, or nothing


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to be done for one context by any process."""

    kind: Literal["plan", "layers", "prefill", "index", "upload"]
    layer_idx: int = -1  # of layers and prefill: the first that is not there
    stop_layer: int = -1  # of layers and prefill
    url: str = ""  # of upload: the store


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is. `done` and `total` count rows of prefill."""

    layer_idx: int
    num_layers: int
    phase: str  # "prefill", "index", or "write": the layer is written, or on its way to be
    done: int
    total: int

    @property
    def share(self) -> float:
        """Of all layers' prefill, 0 to 1."""
        return (self.layer_idx * self.total + self.done) / (self.num_layers * self.total)


OnProgress = Callable[[BuildProgress], None]


class PhaseTimes:
    """How long each part of a build took, checkpoints apart.

    On a GPU all go on beside each other, and some layers are written at once.
    """

    def __init__(self) -> None:
        self.seconds = {"prefill": 0.0, "index": 0.0, "write": 0.0}
        self._lock = Lock()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[phase] += time.perf_counter() - started


def perform(
    piece: Piece,
    plan: Plan,
    store: Path,
    loaded: LoadedModel | None,  # for layers and prefill
    num_threads: int,
    on_progress: OnProgress = lambda progress: None,
    times: PhaseTimes | None = None,
) -> int:
    """Do a piece other than the plan; how many layers were not there before."""
    times = times or PhaseTimes()
    if piece.kind == "index":
        return index_layer(plan.spec, store, piece.layer_idx, num_threads, times)
    if piece.kind == "upload":
        RemoteStore(piece.url).upload(store / plan.spec.artifact_id)
        return 1
    assert loaded is not None
    if piece.kind == "prefill":
        return prefill_layers(loaded, plan, store, piece.stop_layer, None, on_progress, times)
    with ThreadPoolExecutor(num_threads) as threads:
        return prefill_layers(loaded, plan, store, piece.stop_layer, threads, on_progress, times)


def prefill_layers(
    loaded: LoadedModel,
    plan: Plan,
    store: Path,
    stop_layer: int,
    index_threads: Executor | None,  # None hands the layers over to be indexed elsewhere
    on_progress: OnProgress,
    times: PhaseTimes,
) -> int:
    """Make the layers up to `stop_layer`, from the last checkpoint on; how many were not there before."""
    from index_build.capture import may_begin, prefill

    spec, work = plan.spec, _work_dir(store, plan.spec)
    if loaded.fingerprint != spec.model_fingerprint:
        raise ArtifactMismatchError(
            f"the model {loaded.name} has fingerprint {loaded.fingerprint} here and {spec.model_fingerprint} where the "
            "build began; let every node have the same model"
        )
    num_ready = _count_ready(work)
    if num_ready >= stop_layer:  # by a worker that was given up
        return 0
    num_new, done, on_gpu = 0, 0, loaded.device.type == "cuda"

    def report(layer_idx: int, phase: str, num_rows: int = 0) -> None:
        nonlocal done
        done += num_rows
        on_progress(BuildProgress(layer_idx, spec.model.num_layers, phase, done, spec.context_len))

    layers = prefill(
        loaded.model,
        torch.from_numpy(np.array(plan.token_ids)).long(),
        resume=work.load_checkpoint(num_ready),
        on_chunk=lambda layer_idx, num_rows: report(layer_idx, "prefill", num_rows),
    )
    checkpoints = _CheckpointClock(on_gpu)
    with make_outbox(loaded.device, artifact_bytes(spec) // spec.model.num_layers) as outbox:
        while True:
            with times.timed("prefill"):
                capture, leaving = next(layers)
            layer_idx, is_last = capture.layer_idx, capture.layer_idx + 1 == stop_layer
            can_resume = layer_idx + 1 < spec.model.num_layers and may_begin(loaded.model, layer_idx + 1)
            is_needed = can_resume and (checkpoints.is_due() or is_last)
            hidden = leaving.cpu() if is_needed else None
            keep = None if hidden is None else partial(work.save_checkpoint, layer_idx + 1, hidden)
            if not is_ready(work, layer_idx):
                num_new += 1
                report(layer_idx, "index")
                with times.timed("index"):
                    fit = fit_now_or_beside(loaded, capture, leaving)
                kv = capture.kv[:, spec.context_len - spec.model.num_stored(layer_idx, spec.context_len) :]
                make = partial(_make, capture, spec, fit, index_threads, times)
                outbox.send(kv, make, partial(_write, work, layer_idx, times), keep)
                report(layer_idx, "write")
            else:
                outbox.settle(keep)
            if capture.is_reused_at_once:
                outbox.settle()
            done = 0
            if is_last:
                return num_new


def index_layer(spec: ArtifactSpec, store: Path, layer_idx: int, num_threads: int, times: PhaseTimes) -> int:
    """Make the index of a layer that was handed over, and finish it; 0 when that was done before."""
    work = _work_dir(store, spec)
    if work.finished_layer(layer_idx) is not None:
        return 0
    captured = load_captured(work, layer_idx)
    with times.timed("index"), ThreadPoolExecutor(num_threads) as threads:
        arrays = index_arrays(captured.q, captured.kv, spec.index_config, threads)
    with times.timed("write"):
        _finish(work, layer_idx, captured.kv_record, arrays, captured.next_query)
    return 1


def is_ready(work: WorkDir, layer_idx: int) -> bool:
    """Whether a layer needs no prefill."""
    return is_captured(work, layer_idx) or work.finished_layer(layer_idx) is not None


def _count_ready(work: WorkDir) -> int:
    """How many layers from the first on need no prefill."""
    num_layers = work.spec.model.num_layers
    return next((layer_idx for layer_idx in range(num_layers) if not is_ready(work, layer_idx)), num_layers)


class _CheckpointClock:
    """Says when hidden states should be kept."""

    def __init__(self, on_gpu: bool) -> None:
        self._every_s = _CHECKPOINT_EVERY_S_ON_GPU if on_gpu else _CHECKPOINT_EVERY_S
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self._every_s
        self._last = now if due else self._last
        return due


def fit_now_or_beside(loaded: LoadedModel, capture: "LayerCapture", leaving: Tensor) -> Fit:
    """How the next layer's query is predicted, where it is: fitted already, or to be fitted beside the index.

    A CPU leaves it to one thread where the others take as long for the index: of small models, or of long contexts. A
    GPU does not: prefill lends the model the same weights, which two threads must not do at once.
    """
    if not loaded.geometry.is_predicted(capture.layer_idx + 1):
        return dict
    rows = sample_rows(len(leaving), capture.q.shape[2])
    samples = capture.hidden_in[rows], leaving[rows]
    fit = partial(_fit_query, loaded.model, capture.layer_idx + 1, *samples)
    num_products = len(samples) * samples[0].numel() * capture.q[:, 0].numel()
    num_others = torch.get_num_threads() - 1
    if capture.q.is_cuda or num_products * num_others > _PRODUCTS_BESIDE * capture.kv[:, :, 0].numel():
        fitted = fit()
        return lambda: fitted
    return alone(fit)


def _fit_query(model: Any, layer_idx: int, *samples: Tensor) -> dict[str, Tensor]:
    """`next_query`: how that layer's query is predicted, from samples of what enters the layer before and leaves it."""
    with torch.inference_mode(), lent(model, layer_idx, PROJECTS_QUERIES) as layer:
        early, own = (queries_before_rope(layer, hidden) for hidden in samples)
        return {"next_query": fit_predictor(early, own)}


def index_beside(fit: Fit, capture: "LayerCapture", config: IndexConfig, threads: Executor) -> dict[str, Tensor]:
    """The arrays of a layer's index, and what is fitted beside it."""
    with threads_kept():
        fitted = threads.submit(fit)
        return index_arrays(capture.q, capture.kv, config, threads) | fitted.result()


def _make(
    capture: "LayerCapture", spec: ArtifactSpec, fit: Fit, index_threads: Executor | None, times: PhaseTimes
) -> Mapping[str, Tensor]:
    """The queries to hand over, the arrays of the index, or the state of a layer without rows; and what is fitted."""
    with times.timed("index"):
        if capture.layer_idx not in spec.model.indexed_layers:
            return (capture.state or {}) | fit()
        if index_threads is None:
            return {"q": capture.q} | fit()
        arrays = index_beside(fit, capture, spec.index_config, index_threads)
        if capture.q.is_cuda:
            torch.cuda.current_stream().synchronize()  # for the clock's sake
        return arrays


def _write(
    work: WorkDir,
    layer_idx: int,
    times: PhaseTimes,
    arrays: Mapping[str, Tensor],  # KV, and what `_make` made
) -> None:
    with times.timed("write"):
        next_query = arrays["next_query"].numpy() if "next_query" in arrays else None
        if "q" in arrays:
            save_captured(work, layer_idx, arrays["q"], arrays["kv"], next_query)
        elif "memory" in arrays:
            state = {name: arrays[name] for name in ("conv", "memory")}
            _finish(work, layer_idx, work.write_part(state_file(layer_idx), state), {}, next_query)
        else:
            kv_record = work.write_part(kv_file(layer_idx), {"kv": arrays["kv"]})
            index = {name: array for name, array in arrays.items() if name not in ("kv", "next_query")}
            _finish(work, layer_idx, kv_record, index, next_query)


def _finish(
    work: WorkDir,
    layer_idx: int,
    kv_record: FileRecord,
    arrays: Mapping[str, Tensor],
    next_query: NDArray[np.float32] | None,
) -> None:
    """Write the index of a layer whose KV is there, and remove what it was made from."""
    host = {name: array.numpy() for name, array in arrays.items()}
    index = index_from_arrays(work.spec.index_config, work.spec.context_len, host, next_query)
    work.finish_layer(layer_idx, kv_record, index)
    drop_handover(work, layer_idx)


def _work_dir(store: Path, spec: ArtifactSpec) -> WorkDir:
    work = WorkDir(store, spec)
    if not work.parts.is_dir():
        raise ArtifactError(
            f"{work.path} is not there on this node; give a store that every node sees under the same path"
        )
    return work
