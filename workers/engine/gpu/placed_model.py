"""A model and its contexts on a GPU: memory is planned first, then everything is allocated and loaded once."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import IndexConfig
from csattn.errors import ConfigError
from csattn.models.compressed import compressed_states
from csattn.models.weights import ModelWeights
from csattn.search.device import DeviceLayerIndex, SketchShape, index_shape, to_device
from offload.errors import MemoryPlanError, PinningError
from offload.host_memory import allocate_rows
from offload.pinned import PinnedRows
from workers.engine.gpu.attend_all import AttendAll, StreamedRows, reads_once
from workers.engine.gpu.attend_chosen import AttendChosen
from workers.engine.gpu.attend_compressed import AttendCompressed
from workers.engine.gpu.attend_latents import AttendLatents
from workers.engine.gpu.compressed_memory import CompressedMemory
from workers.engine.gpu.far_rows import CachedRows, DeviceRows, context_layers
from workers.engine.gpu.latent_memory import CachedLatents, LatentPlaces
from workers.engine.gpu.local_layers import LocalLayers
from workers.engine.gpu.memory import Placement, plan_context, plan_memory
from workers.engine.gpu.on_device import SearchOnDevice
from workers.engine.gpu.on_host import SearchOnHost, StepSearcher
from workers.engine.gpu.own_on_device import OwnOnDevice, own_cache
from workers.engine.gpu.own_rows import MovingRows, RowsInTails
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.sparse_or_full import SparseOrFull, full_attention_shape
from workers.engine.gpu.step_model import StepModel
from workers.engine.gpu.stream_thread import run_in_thread, stream_thread, synchronize_stream
from workers.engine.lossy_keys import warn_of_lossy_keys
from workers.engine.model_choice import model_selects_rows
from workers.model import ModelRunner
from workers.model.attention import StepAttention

_FarRows = DeviceRows | CachedRows | StreamedRows | LatentPlaces | CachedLatents | CompressedMemory
_Attention = SearchOnDevice | SearchOnHost | AttendAll | AttendLatents | AttendCompressed
_LOCKING_S = 0.012  # least time for pinning memory between two steps of other requests: about what a step takes
Progress = Callable[[str, int, int], None]  # gets what is being loaded, how many parts are done, and of how many


class PlacedModel:
    """Owns the model's weights on the device, the contexts in their placement, and the steps over them.

    Raises MemoryPlanError, before anything is allocated, if device or host memory is too small.
    """

    def __init__(
        self,
        model: StepModel,
        index_config: IndexConfig,  # of all contexts
        shape: EngineShape,
        placement: Placement,
        *,
        device: torch.device,
        num_cache_slots: int,  # cache slots on the device per layer, context and KV head, where the KV is on the host
        searcher: StepSearcher | None,  # in placement `host`
        on_progress: Progress,
        first: Artifact | None = None,  # a context that will be added, to be included in the plan
    ) -> None:
        self.model, self.shape, self.placement, self.device = model, shape, placement, device
        self.index_config = index_config
        if first is not None:
            self._require_fit(first)
        self._num_cache_slots = num_cache_slots
        self.plan = plan_memory(model.num_bytes, index_config, shape, placement, num_cache_slots, first)
        self.plan.require(model.available(device))
        self._on_progress = on_progress
        self.artifacts: dict[int, Artifact] = {}
        self._pinned: dict[int, PinnedRows] = {}
        self._loader = stream_thread(device, "loading")
        self._spec = model.spec
        weights = model.take(device)
        sinks = _sinks_of(weights)
        self.own: OwnOnDevice | None = None  # if requests' own rows become segments
        self._own_on_host: tuple[PinnedRows, CachedRows] | None = None  # if the first own rows move to the host
        of_indexed = None if sinks is None else sinks[list(self._spec.indexed_layers)]
        self.far, self.attention = self._make_attention(of_indexed, weights, searcher)
        self.choosing = self.attention if isinstance(self.attention, AttendChosen) else None  # rows by keys
        self._searcher = searcher if isinstance(self.attention, SearchOnHost) else None
        inner: StepAttention = self.attention
        if shape.sparse_or_full:
            assert isinstance(self.far, DeviceRows) and reads_once(full_attention_shape(shape))
            tails = self.attention.tails
            assert isinstance(tails, Tensor)
            inner = SparseOrFull(inner, AttendAll(full_attention_shape(shape), self.far, device, of_indexed, tails))
        self.local: LocalLayers | None = None
        if not model_selects_rows(self._spec) and len(self._spec.indexed_layers) < self._spec.num_layers:
            self.local = LocalLayers(shape, self._spec, inner, sinks, device)
        self.own_rows = self._make_own_rows()
        self._next_query: Tensor | None = None
        if self.attention.lookahead:
            self._next_query = torch.zeros(shape.next_query_sizes, dtype=shape.dtype, device=device)
        self.runner = ModelRunner(
            weights,
            self.local or inner,
            shape.batch_sizes,
            self._next_query,
            grows=self.own is not None,
            may_read_all=shape.sparse_or_full,
            devices=model.devices,
        )

    def close(self) -> None:
        """Unpin host memory. No step may be in flight."""
        self._loader.shutdown()
        self._wait()
        self.own_rows.close()
        for pinned in self._pinned.values():
            pinned.close()
        if self.choosing is not None:
            self.choosing.close()

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Load a context; its artifact must stay open until it is removed. Raises MemoryPlanError if there is no room.

        meanwhile: called again and again until it is loaded, to run steps over other contexts.
        """
        if not 0 <= context_id < self.shape.num_contexts:
            raise MemoryPlanError(
                f"there is room for {self.shape.num_contexts} contexts at the same time; remove one, or start the "
                "engine with room for more"
            )
        assert context_id not in self.artifacts, f"context {context_id} is loaded already"
        self._require_fit(artifact)
        plan_context(self.shape, artifact, self.placement).require(self.model.available(self.device))
        self._load(context_id, artifact, meanwhile)

    def has_room_for(self, artifact: Artifact) -> bool:
        """Whether the plan covers the artifact's length and index configuration."""
        fits = artifact.spec.context_len <= self.shape.max_context_len
        return fits and artifact.spec.index_config == self.index_config

    def require_same_index(self, artifact: Artifact) -> None:
        """Raise ConfigError if the artifact's index is configured differently."""
        if artifact.spec.index_config != self.index_config:
            raise ConfigError("the artifacts have different index configurations; start an engine for each")

    def remove_context(self, context_id: int) -> None:
        """Unload a context. No step may be in flight."""
        self._wait()
        if self.choosing is not None:
            self.choosing.unload(context_id)
        if self._searcher is not None:
            self._searcher.unload(context_id)
        self.far.unload(context_id)
        if pinned := self._pinned.pop(context_id, None):
            pinned.close()
        del self.artifacts[context_id]

    def _together(self) -> AbstractContextManager[None]:
        """Make the body succeed on all devices or raise on all; with a single device, do nothing."""
        return nullcontext() if self.model.devices is None else self.model.devices.all_or_none()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _require_fit(self, artifact: Artifact) -> None:
        artifact.require_model(self.model.fingerprint, self.model.geometry, self.model.tokenizer_hash)
        self.require_same_index(artifact)
        if artifact.spec.context_len > self.shape.max_context_len:
            raise ConfigError(
                f"the context has {artifact.spec.context_len:,} rows, the engine was planned for "
                f"{self.shape.max_context_len:,}; start it with a larger max_context_len"
            )

    def begin_request(self, tail_id: int, context_id: int) -> None:
        """Initialize what layers keep of a request besides rows from its context; context_id -1: without one."""
        if isinstance(self.far, CompressedMemory):
            self.far.begin_request(tail_id, context_id)
        elif self.local is not None:
            self.local.begin_request(tail_id, context_id)

    def _make_attention(
        self, sinks: Tensor | None, weights: ModelWeights, searcher: StepSearcher | None
    ) -> tuple[_FarRows, _Attention]:
        shape, device = self.shape, self.device
        if shape.compressed:
            memory, layers = CompressedMemory(shape, device), [layer.compressed for layer in weights.layers]
            return memory, AttendCompressed(shape, [of for of in layers if of is not None], memory, device)
        if shape.latents is not None:
            everything = self.placement == "device"
            latents = LatentPlaces(shape, device) if everything else CachedLatents(shape, self._num_cache_slots, device)
            return latents, AttendLatents(shape, self._spec, latents, device)
        if shape.attends_all:
            rows = DeviceRows(shape, device) if self.placement == "device" else StreamedRows(shape, device)
            return rows, AttendAll(shape, rows, device, sinks)
        index = index_shape(self.index_config, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        tails = shape.make_tails(device)
        if shape.max_own_segments:
            assert isinstance(index, SketchShape)
            self._own_on_host = self._make_own_on_host()
            own_cached = self._own_on_host and self._own_on_host[1]
            self.own = OwnOnDevice(shape, index, tails, device, own_cached)
        if self.placement == "device":
            on_device = DeviceRows(shape, device)
            return on_device, SearchOnDevice(shape, index, on_device, device, tails, self.own, sinks)
        cached = CachedRows(shape, self._num_cache_slots, device)
        if searcher is None or self.placement != "host":
            return cached, SearchOnDevice(shape, index, cached, device, tails, self.own, sinks)
        return cached, SearchOnHost(shape, index, cached, searcher, device, tails, self.own, sinks)

    def _make_own_on_host(self) -> tuple[PinnedRows, CachedRows] | None:
        shape = self.shape
        if shape.own_capacity is None:
            return None
        sizes = shape.num_tails, shape.num_kv_heads, shape.own_capacity, 2, shape.head_dim
        on_progress = partial(self._on_progress, "pinning host memory for requests")
        pinned = self._pin(allocate_rows(shape.num_layers, sizes, shape.dtype), on_progress)
        return pinned, own_cache(shape, self.device)

    def _make_own_rows(self) -> RowsInTails:
        tails = self.attention.tails
        if not isinstance(tails, Tensor):  # compressed layers: a request cannot be continued from rows alone
            return RowsInTails(tails[0][None])
        if self._own_on_host is None:
            return RowsInTails(tails)
        windows = [i for i, layer in enumerate(self._spec.layers) if layer.attention.reach is not None]
        local = [] if self.local is None else [self.local.tails[layer_idx] for layer_idx in windows]
        return MovingRows(self.shape, tails, local, *self._own_on_host)

    def _load(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None]) -> None:
        """Load all of a context or nothing: after an error its memory is free and unpinned, and it can be retried."""
        with ExitStack() as undo:
            with self._together():
                built = artifact.local_kv() if self.shape.latents is not None else artifact.indexed_kv()
                if self.far.on_host:
                    self._load_on_host(context_id, built, undo, meanwhile)
                run_in_thread(self._loader, partial(self._load_on_device, context_id, artifact, built, undo), meanwhile)
                if self._searcher is not None:
                    self._searcher.load(context_id, artifact)
                    undo.callback(self._searcher.unload, context_id)
            undo.pop_all()
        self.artifacts[context_id] = artifact

    def _load_on_host(
        self, context_id: int, built: Sequence[Tensor], undo: ExitStack, meanwhile: Callable[[], None]
    ) -> None:
        """Pin layer by layer in this thread, with steps in between: the driver does nothing else while it pins."""
        since = 0.0  # when other requests last had a step

        def on_progress(done: int, total: int) -> None:
            nonlocal since
            self._on_progress("pinning host memory", done, total)
            if time.monotonic() - since >= _LOCKING_S:
                meanwhile()
                since = time.monotonic()

        layers = run_in_thread(self._loader, lambda: list(context_layers(self.shape, built)), meanwhile)
        self._pinned[context_id] = self._pin(layers, on_progress)
        undo.callback(lambda: self._pinned.pop(context_id).close())

    def _load_on_device(self, context_id: int, artifact: Artifact, built: Sequence[Tensor], undo: ExitStack) -> None:
        """Load into places that steps over other contexts do not read."""
        if isinstance(self.far, LatentPlaces):
            self.far.load(context_id, built)
        elif isinstance(self.far, CompressedMemory):
            self.far.load(context_id, compressed_states(artifact), artifact.spec.context_len)
        elif isinstance(self.far, DeviceRows):
            on_progress = partial(self._on_progress, "loading KV")
            self.far.load(context_id, context_layers(self.shape, built), on_progress)
        else:
            self.far.load(context_id, self._pinned[context_id])
        undo.callback(self.far.unload, context_id)
        if self.shape.kv_format is not None:
            warn_of_lossy_keys(artifact, built, self.shape.kv_format)
        if self.choosing is not None:
            kv = self.far.layers(context_id) if isinstance(self.far, DeviceRows) else self._pinned[context_id].layers
            plain = None if self.shape.kv_format is None else built
            self.choosing.load(context_id, kv, self._indexes_of(artifact), plain)
            undo.callback(self.choosing.unload, context_id)
        if self._next_query is not None:
            for number, layer_idx in enumerate(self._spec.indexed_layers[1:]):
                self._next_query[context_id, number].copy_(torch.tensor(artifact.next_query(layer_idx - 1)))
        if self.local is not None:
            self.local.load(context_id, artifact.local_kv(), artifact.states())
        synchronize_stream(self.device)

    def _indexes_of(self, artifact: Artifact) -> Iterator[DeviceLayerIndex]:
        """Copy an index to the device, layer by layer."""
        for number, index in enumerate(artifact.indexes(), 1):
            yield to_device(index, self.device)
            self._on_progress("loading the index", number, self.shape.num_layers)

    def _pin(self, kv: Sequence[Tensor], on_progress: Callable[[int, int], None]) -> PinnedRows:
        pinned = PinnedRows(kv, progress=on_progress)
        if not pinned.pinned:
            raise PinningError(
                f"the device cannot read the KV in host memory ({pinned.how}); raise the limit of locked memory "
                "(`ulimit -l`), choose the placement device, or decode on the CPU"
            )
        return pinned


def _sinks_of(weights: ModelWeights) -> Tensor | None:
    """Sink logits [all layers, num_q_heads] float32; None if the model has none."""
    sinks = [layer.sinks for layer in weights.layers if layer.sinks is not None]
    return torch.stack(sinks) if sinks else None
