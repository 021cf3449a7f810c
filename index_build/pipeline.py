"""The offline job: context in, artifact out, layer by layer, on the device that the model is on."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn import __version__
from csattn.artifact import ArtifactSpec, ArtifactWriter, cache_store, hash_token_ids, remote_store, require_space
from csattn.artifact.handover import load_captured
from csattn.config import IndexConfig, ListConfig
from csattn.cpus import available_cpus
from csattn.errors import ContextError
from csattn.models import LoadedModel
from csattn.models.query import queries_before_rope
from index_build.capture import LayerCapture, prefill
from index_build.kmeans import kmeans_version, set_kmeans_threads
from index_build.layer import as_layer_index, index_arrays
from index_build.outbox import make_outbox
from index_build.predictor import fit_predictor, sample_rows

# Fewer rows than this are cheaper to attend to than to index.
MIN_CONTEXT_LEN = 256
# On a GPU a layer takes less time than its hidden states take to be written: not every layer is worth a checkpoint.
_CHECKPOINT_EVERY_S, _CHECKPOINT_EVERY_S_ON_GPU = 0.0, 60.0


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is. `done` and `total` count rows of prefill."""

    layer_idx: int
    num_layers: int
    phase: str  # "prefill", "index" or "write"
    done: int
    total: int


@dataclass(slots=True)
class BuildReport:
    """What a build did, and how long each part took; on a GPU, writing goes on beside the other two."""

    artifact_id: str
    path: Path
    reused: bool  # the artifact was there already
    resumed_at: int  # first layer of this run; more than 0 when an earlier run was interrupted
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "index": 0.0, "write": 0.0})
    url: str | None = None  # when the store is a URL; then `path` is the copy on this machine, or where it would be

    @property
    def place(self) -> Path | str:
        """What `open_artifact` takes."""
        return self.url or self.path

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


def build_artifact(
    loaded: LoadedModel,
    token_ids: NDArray[np.int32],  # [context_len]
    config: IndexConfig,
    store: Path | str,  # a directory, or a URL that fsspec knows
    *,
    notes: dict[str, Any] | None = None,  # JSON, kept in the manifest
    on_progress: Callable[[BuildProgress], None] = lambda progress: None,
    on_wait: Callable[[], None] | None = None,  # another process is building the same artifact
    num_threads: int | None = None,
) -> BuildReport:
    """Prefill the context and write its KV and index to the store; go on where an interrupted build stopped.

    Raises ContextError for a context that is too short or too long, CaptureError for NaN, ArtifactError or
    StoreFullError when the store cannot be written.
    """
    spec = make_spec(loaded, token_ids, config)
    remote = remote_store(store)
    local = Path(store) if remote is None else cache_store()
    report = BuildReport(spec.artifact_id, local / spec.artifact_id, reused=True, resumed_at=0)
    if remote is not None:
        report.url = f"{remote.url}/{spec.artifact_id}"
        if remote.holds(spec.artifact_id):
            return report
    with ArtifactWriter(local, spec, token_ids, on_wait) as writer:
        if writer.finished_path is None:
            report.reused = False
            require_space(local, writer.remaining_bytes)
            _write_layers(loaded, token_ids, config, writer, report, on_progress, num_threads or available_cpus())
            writer.finish(library_versions(loaded.device), notes or {})
    if remote is not None:
        remote.upload(report.path)
    return report


def make_spec(loaded: LoadedModel, token_ids: NDArray[np.int32], config: IndexConfig) -> ArtifactSpec:
    """What the artifact of these tokens will be. Raises ContextError when they are too few or too many."""
    _require_indexable(len(token_ids), config, loaded)
    return ArtifactSpec(
        model_name=loaded.name,
        model_fingerprint=loaded.fingerprint,
        model=loaded.geometry,
        tokenizer_hash=loaded.tokenizer_hash,
        token_ids_sha256=hash_token_ids(token_ids),
        context_len=len(token_ids),
        index_config=config,
        kv_dtype=str(loaded.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # the spec refuses others
    )


def _write_layers(
    loaded: LoadedModel,
    token_ids: NDArray[np.int32],
    config: IndexConfig,
    writer: ArtifactWriter,
    report: BuildReport,
    on_progress: Callable[[BuildProgress], None],
    num_threads: int,
) -> None:
    resume = writer.load_checkpoint()
    report.resumed_at = resume[0] if resume else 0
    num_layers, context_len = loaded.geometry.num_layers, len(token_ids)
    done = 0

    def tell(layer_idx: int, phase: str) -> None:
        on_progress(BuildProgress(layer_idx, num_layers, phase, done, context_len))

    def on_chunk(layer_idx: int, num_rows: int) -> None:
        nonlocal done
        done += num_rows
        tell(layer_idx, "prefill")

    set_kmeans_threads(1)  # k-means of different subspaces run side by side instead
    on_gpu = loaded.device.type == "cuda"
    checkpoints = CheckpointClock(on_gpu)
    with ThreadPoolExecutor(num_threads) as threads, make_outbox(loaded.device) as outbox:
        _index_captured(writer, report, threads)
        layers = prefill(loaded.model, torch.from_numpy(token_ids).long(), resume=resume, on_chunk=on_chunk)
        while True:
            with report.timed("prefill"):
                capture, leaving = next(layers, (None, None))
            if capture is None or leaving is None:
                return
            tell(capture.layer_idx, "index")
            outbox.take_kv(capture.kv)
            with report.timed("index"):
                next_query = fit_next_query(loaded.model, capture, leaving)
                arrays = index_arrays(capture.q, capture.kv, config, threads)
                if on_gpu:
                    torch.cuda.current_stream().synchronize()  # for the clock's sake
            tell(capture.layer_idx, "write")
            hidden = leaving.cpu() if checkpoints.is_due() else None
            outbox.send(arrays, partial(_write_layer, writer, report, capture.layer_idx, next_query, hidden))
            done = 0


def _index_captured(writer: ArtifactWriter, report: BuildReport, threads: ThreadPoolExecutor) -> None:
    """Index the layers that a cluster had prefilled when its build was interrupted."""
    spec = writer.spec
    for layer_idx in writer.captured_layers:
        captured = load_captured(writer.work, layer_idx)
        with report.timed("index"):
            arrays = index_arrays(captured.q, captured.kv, spec.index_config, threads)
        index = as_layer_index(arrays, spec.index_config, spec.context_len, captured.next_query)
        with report.timed("write"):
            writer.write_index(layer_idx, captured.kv_record, index)


class CheckpointClock:
    """Says when hidden states should be kept."""

    def __init__(self, on_gpu: bool) -> None:
        self._every_s = _CHECKPOINT_EVERY_S_ON_GPU if on_gpu else _CHECKPOINT_EVERY_S
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self._every_s
        self._last = now if due else self._last
        return due


def _write_layer(
    writer: ArtifactWriter,
    report: BuildReport,
    layer_idx: int,
    next_query: NDArray[np.float32] | None,
    hidden: Tensor | None,  # what leaves the layer, when it is to be kept
    arrays: Mapping[str, Tensor],
) -> None:
    with report.timed("write"):
        index = {name: array for name, array in arrays.items() if name != "kv"}
        spec = writer.spec
        writer.write_layer(
            layer_idx, arrays["kv"], as_layer_index(index, spec.index_config, spec.context_len, next_query)
        )
        if hidden is not None:
            writer.save_checkpoint(layer_idx + 1, hidden)


def fit_next_query(model: Any, capture: LayerCapture, leaving: Tensor) -> NDArray[np.float32] | None:
    """How to tell the next layer's query from this layer's input; None after the last layer."""
    layers = model.model.layers
    if capture.layer_idx + 1 == len(layers):
        return None
    rows = sample_rows(len(leaving), capture.q.shape[2])
    following = layers[capture.layer_idx + 1]
    with torch.inference_mode():
        return fit_predictor(
            queries_before_rope(following, capture.hidden_in[rows]), queries_before_rope(following, leaving[rows])
        )


def _require_indexable(context_len: int, config: IndexConfig, loaded: LoadedModel) -> None:
    shortest = max(MIN_CONTEXT_LEN, config.num_centroids) if isinstance(config, ListConfig) else MIN_CONTEXT_LEN
    if context_len < shortest:
        raise ContextError(
            f"the context has {context_len} tokens, an index needs at least {shortest}; "
            "a context this short is better put into the prompt"
        )
    if context_len >= loaded.geometry.max_positions:
        raise ContextError(
            f"the context has {context_len} tokens and {loaded.name} has {loaded.geometry.max_positions} positions, "
            "one at least for the question; shorten the context or use a model with more positions"
        )


def library_versions(device: torch.device) -> dict[str, Any]:
    return {
        "csattn": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **kmeans_version(),
    }
