"""Build the layers of an artifact: each is prefilled, indexed and written. Finished layers are kept."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from csattn.artifact import ArtifactSpec, WorkDir
from csattn.artifact.layout import artifact_bytes, file_layout, index_from_arrays, layer_files
from csattn.config import IndexConfig
from csattn.models import LoadedModel
from csattn.models.layer_offload import layer_on_device
from csattn.models.query import projects_queries, queries_before_rope
from csattn.torch_threads import on_one_thread, preserve_num_threads
from index_build.board import BuildProgress
from index_build.layer import index_arrays
from index_build.outbox import make_outbox
from index_build.plan import Plan
from index_build.predictor import fit_predictor, sample_rows

if TYPE_CHECKING:  # it imports transformers, which takes seconds and is not needed to make an index
    from index_build.capture import LayerCapture

# On a GPU a layer takes less time than writing its hidden states does, so not every layer gets a checkpoint.
_CHECKPOINT_EVERY_S, _CHECKPOINT_EVERY_S_ON_GPU = 0.0, 60.0
# multiply-adds of a predictor's fit in the time in which the index processes one element of a key, by one thread each
_PRODUCTS_PER_ELEMENT = 1000

Fit = Callable[[], dict[str, Tensor]]  # returns the result of `_fit_query`, or an empty dict


OnProgress = Callable[[BuildProgress], None]


class PhaseTimes:
    """The seconds that each phase of a build took, without checkpoints.

    On a GPU the phases overlap, and several layers are written concurrently.
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


def make_layers(
    loaded: LoadedModel, plan: Plan, work: WorkDir, num_threads: int, on_progress: OnProgress, times: PhaseTimes
) -> None:
    """Build the missing layers, from the last checkpoint on."""
    from index_build.capture import can_start_at, prefill

    spec, num_layers = plan.spec, plan.spec.model.num_layers
    is_there = [work.finished_layer(layer_idx) is not None for layer_idx in range(num_layers)]
    if all(is_there):
        return
    done, on_gpu = 0, loaded.device.type == "cuda"

    def report(layer_idx: int, phase: str, num_rows: int = 0) -> None:
        nonlocal done
        done += num_rows
        on_progress(BuildProgress(layer_idx, num_layers, phase, done, spec.context_len))

    layers = prefill(
        loaded.model,
        torch.from_numpy(np.array(plan.token_ids)).long(),
        resume=work.load_checkpoint(is_there.index(False)),
        on_chunk=lambda layer_idx, num_rows: report(layer_idx, "prefill", num_rows),
    )
    checkpoints = _CheckpointClock(on_gpu)
    layer_bytes = artifact_bytes(spec) // num_layers
    # closed, because an error that is kept, as by a notebook, would keep the prefill open, and the model changed
    with closing(layers), ThreadPoolExecutor(num_threads) as threads, make_outbox(loaded.device, layer_bytes) as outbox:
        while True:
            with times.timed("prefill"):
                capture, hidden_out = next(layers)
            layer_idx = capture.layer_idx
            can_resume = layer_idx + 1 < num_layers and can_start_at(loaded.model, layer_idx + 1)
            hidden = hidden_out.cpu() if can_resume and checkpoints.is_due() else None
            keep = None if hidden is None else partial(work.save_checkpoint, layer_idx + 1, hidden)
            if not is_there[layer_idx]:
                report(layer_idx, "index")
                with times.timed("index"):
                    fit = make_fit(loaded, capture, hidden_out)
                kv = capture.kv[:, spec.context_len - spec.model.num_stored(layer_idx, spec.context_len) :]
                make = partial(_make, capture, spec, fit, threads, times)
                outbox.send(kv, make, partial(_write, work, layer_idx, times), keep)
                report(layer_idx, "write")
            else:
                outbox.wait_until_read(keep)
            if capture.is_single_buffered:
                outbox.wait_until_read()
            done = 0
            if layer_idx + 1 == num_layers:
                return


class _CheckpointClock:
    """Decides when hidden states are saved as a checkpoint."""

    def __init__(self, on_gpu: bool) -> None:
        self._every_s = _CHECKPOINT_EVERY_S_ON_GPU if on_gpu else _CHECKPOINT_EVERY_S
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self._every_s
        self._last = now if due else self._last
        return due


def make_fit(loaded: LoadedModel, capture: "LayerCapture", hidden_out: Tensor) -> Fit:
    """Return a function that fits the next layer's query predictor, if it has one; the fit may be done already.

    On a CPU it is left to one thread if the other threads take at least as long for the index, as with small models or
    long contexts. On a GPU it is done here: prefill lends the model the same weights, which two threads must not do at
    once.
    """
    if not loaded.geometry.is_predicted(capture.layer_idx + 1):
        return dict
    rows = sample_rows(len(hidden_out), capture.q.shape[2])
    samples = capture.hidden_in[rows], hidden_out[rows]
    fit = partial(_fit_query, loaded.model, capture.layer_idx + 1, *samples)
    num_products = len(samples) * samples[0].numel() * capture.q[:, 0].numel()
    num_others = torch.get_num_threads() - 1
    if capture.q.is_cuda or num_products * num_others > _PRODUCTS_PER_ELEMENT * capture.kv[:, :, 0].numel():
        fitted = fit()
        return lambda: fitted
    return on_one_thread(fit)


def _fit_query(model: Any, layer_idx: int, *samples: Tensor) -> dict[str, Tensor]:
    """Fit `next_query`, the predictor of the layer's queries, to samples of the previous layer's input and output."""
    with torch.inference_mode(), layer_on_device(model, layer_idx, projects_queries(model)):
        early, own = (queries_before_rope(model, layer_idx, hidden) for hidden in samples)
        return {"next_query": fit_predictor(early, own)}


def index_and_fit(fit: Fit, capture: "LayerCapture", config: IndexConfig, threads: Executor) -> dict[str, Tensor]:
    """Make the arrays of a layer's index and, on another thread, the fit."""
    with preserve_num_threads():
        fitted = threads.submit(fit)
        return index_arrays(capture.q, capture.kv, config, threads) | fitted.result()


def _make(
    capture: "LayerCapture", spec: ArtifactSpec, fit: Fit, index_threads: Executor, times: PhaseTimes
) -> Mapping[str, Tensor]:
    """Make the arrays of the index, or of the state of a layer without an index, and those of the fit."""
    with times.timed("index"):
        if capture.layer_idx not in spec.model.indexed_layers:
            return (capture.state or {}) | fit()
        arrays = index_and_fit(fit, capture, spec.index_config, index_threads)
        if capture.q.is_cuda:
            torch.cuda.current_stream().synchronize()  # so that the phase is timed correctly
        return arrays


def _write(
    work: WorkDir,
    layer_idx: int,
    times: PhaseTimes,
    arrays: Mapping[str, Tensor],  # KV, and the arrays of `_make`
) -> None:
    with times.timed("write"):
        name, *_ = layer_files(work.spec, layer_idx)
        kept = [tensor.name for tensor, _ in file_layout(work.spec, name).tensors]
        record = work.write_part(name, {key: arrays[key] for key in kept})
        host = {key: array.numpy() for key, array in arrays.items() if key not in ("kv", *kept)}
        next_query = host.pop("next_query", None)
        work.finish_layer(
            layer_idx, record, index_from_arrays(work.spec.index_config, work.spec.context_len, host, next_query)
        )
