"""A model and its contexts on a GPU, ready to decode: memory is planned first, then everything is loaded, once."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig, SketchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.search import SearchPool
from csattn.search.device import DeviceLayerIndex, IndexShape, index_shape, to_device
from csattn.selectors import resolve_rest
from offload.budget import available_memory
from offload.errors import MemoryPlanError, NoDeviceError, PinningError
from offload.pinned import PinnedRows
from workers.engine.far_rows import CachedRows, DeviceRows
from workers.engine.memory import Placement, placement_named, plan_context, plan_memory
from workers.engine.on_device import SearchOnDevice
from workers.engine.on_host import SearchOnHost
from workers.engine.searcher import StepSearcher
from workers.engine.shape import EngineShape
from workers.engine.watch import Watch
from workers.model_runner import ModelRunner, take_weights
from workers.searchers.step_searches import StepSearches

BATCH_SIZES = (1, 8)  # one request's steps, and its question eight tokens at a time
TAIL_CAPACITY = 2048
SLOT_SHARE = 0.15  # of a context's rows, kept on the device where its KV is on the host

Progress = Callable[[str, int, int], None]  # what is being loaded, done, in all


class Engine:
    """Owns the model's weights on the device, the contexts in their placement, and the decode loop over them.

    Raises MemoryPlanError, before anything is allocated, where the machine has not enough of some memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        artifacts: Sequence[Artifact],  # each becomes the context of its number; open until it is removed
        config: SearchConfig,
        placement: Placement | str,
        *,
        device: torch.device | None = None,
        batch_sizes: tuple[int, ...] = BATCH_SIZES,
        num_tails: int = 1,
        tail_capacity: int = TAIL_CAPACITY,
        num_contexts: int | None = None,  # loaded at the same time; those that are given, unless said
        max_context_len: int | None = None,  # rows of the longest; the longest that is given, unless said
        slot_share: float = SLOT_SHARE,
        num_threads: int | None = None,  # that search, in placement `host`; all cores unless said
        searcher: StepSearcher | None = None,  # in placement `host`; closed with the engine; threads unless given
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        if not 0 < slot_share <= 1:
            raise ConfigError(f"slot_share must lie in (0, 1], got {slot_share}")
        require_device()
        self.device = device or torch.device("cuda", 0)
        self.loaded, self.placement = loaded, placement_named(placement)
        self.shape = _engine_shape(
            loaded, artifacts, config, batch_sizes, num_tails, tail_capacity, num_contexts, max_context_len
        )
        for artifact in artifacts:
            self._require_fit(artifact)
        self._num_slots = max(1, int(slot_share * self.shape.max_context_len))
        self.plan = plan_memory(loaded, artifacts, self.shape, self.placement, self._num_slots)
        self.plan.require(available_memory(self.device))
        self._on_progress = on_progress
        self.artifacts: dict[int, Artifact] = {}
        self._pinned: dict[int, PinnedRows] = {}
        self._searcher = searcher
        if self.placement == "host" and searcher is None:
            self._searcher = StepSearches(SearchPool(num_threads or available_cpus()))
        self._index_config = artifacts[0].spec.index_config
        self.far, self.attention = self._place(index_shape(artifacts[0].layer_index(0), self.shape.num_q_heads))
        self._next_query = _room_for_next_query(self.shape, self.device) if config.lookahead else None
        for context_id, artifact in enumerate(artifacts):
            self._load(context_id, artifact)
        self.watch = Watch(self.attention)
        self.runner = ModelRunner(
            take_weights(loaded.model, self.device), self.watch, self.shape.batch_sizes, self._next_query
        )

    def __repr__(self) -> str:
        return f"<Engine {self.loaded.name} in placement {self.placement}: {self.attention!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give page locks and threads back. No step may be in flight."""
        self._wait()
        for pinned in self._pinned.values():
            pinned.close()
        if self._searcher is not None:
            self._searcher.close()

    def add_context(self, context_id: int, artifact: Artifact) -> None:
        """Load one more, between steps. Raises MemoryPlanError where there is no room for it."""
        if not 0 <= context_id < self.shape.num_contexts:
            raise MemoryPlanError(
                f"there is room for {self.shape.num_contexts} contexts at the same time; remove one, or start the "
                "engine with room for more"
            )
        assert context_id not in self.artifacts, f"there is a context {context_id} already"
        self._require_fit(artifact)
        if artifact.spec.index_config != self._index_config:
            raise ConfigError("the artifacts have different index configurations; start an engine for each")
        plan_context(self.shape, artifact, self.placement).require(available_memory(self.device))
        self._load(context_id, artifact)

    def remove_context(self, context_id: int) -> None:
        """Forget a context, between steps."""
        self._wait()
        self.attention.unload(context_id)
        if self._searcher is not None:
            self._searcher.unload(context_id)
        self.far.unload(context_id)
        if pinned := self._pinned.pop(context_id, None):
            pinned.close()
        del self.artifacts[context_id]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _require_fit(self, artifact: Artifact) -> None:
        artifact.require_model(self.loaded.fingerprint)
        artifact.require_tokenizer(self.loaded.tokenizer_hash)
        if artifact.spec.context_len > self.shape.max_context_len:
            raise ConfigError(
                f"the context has {artifact.spec.context_len:,} rows, the engine was planned for "
                f"{self.shape.max_context_len:,}; start it with a larger max_context_len"
            )

    def _place(self, index: IndexShape) -> tuple[DeviceRows | CachedRows, SearchOnDevice | SearchOnHost]:
        if self.placement == "device":
            rows = DeviceRows(self.shape, self.device)
            return rows, SearchOnDevice(self.shape, index, rows, self.device)
        cached = CachedRows(self.shape, self._num_slots, self.device)
        if self._searcher is None:
            return cached, SearchOnDevice(self.shape, index, cached, self.device)
        return cached, SearchOnHost(self.shape, index, cached, self._searcher, self.device)

    def _load(self, context_id: int, artifact: Artifact) -> None:
        kv = [artifact.layer_kv(layer_idx) for layer_idx in range(self.shape.num_layers)]
        if isinstance(self.far, DeviceRows):
            self.far.load(context_id, kv)
            kv = self.far.layers(context_id)
        else:
            self._pinned[context_id] = self._pin(kv)
            kv = self._pinned[context_id].layers
            self.far.load(context_id, self._pinned[context_id])
        if isinstance(self.attention, SearchOnHost):
            indexes = [artifact.layer_index(layer_idx) for layer_idx in range(self.shape.num_layers)]
            self.attention.load(context_id, kv, indexes)
            assert self._searcher is not None
            self._searcher.load(context_id, artifact)
        else:
            self.attention.load(context_id, kv, self._index_on_device(artifact))
        if self._next_query is not None:
            for layer_idx in range(self.shape.num_layers - 1):
                matrix = artifact.layer_index(layer_idx).next_query
                self._next_query[context_id, layer_idx].copy_(torch.tensor(matrix))
        self.artifacts[context_id] = artifact

    def _pin(self, kv: Sequence[Tensor]) -> PinnedRows:
        def tell(done: int, total: int) -> None:
            self._on_progress("pinning host memory", done, total)

        pinned = PinnedRows(kv, progress=tell)
        if not pinned.pinned:
            raise PinningError(
                f"the device cannot read the context's KV where it lies in host memory ({pinned.how}); raise the limit "
                "of locked memory (`ulimit -l`), choose the placement device, or decode on the CPU"
            )
        return pinned

    def _index_on_device(self, artifact: Artifact) -> list[DeviceLayerIndex]:
        layers = []
        for layer_idx in range(self.shape.num_layers):
            layers.append(to_device(artifact.layer_index(layer_idx), self.device))
            self._on_progress("loading the index", layer_idx + 1, self.shape.num_layers)
        return layers


def require_device() -> None:
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "this machine has no CUDA device, or torch is a build without CUDA; leave out the placement to decode on "
            "the CPU"
        )
    if find_spec("cupy") is None:
        raise NoDeviceError(
            "the GPU engine needs CuPy, which is not installed: pip install -e '.[gpu]', or '.[gpu-cu13]' for CUDA 13"
        )


def _engine_shape(
    loaded: LoadedModel,
    artifacts: Sequence[Artifact],
    config: SearchConfig,
    batch_sizes: tuple[int, ...],
    num_tails: int,
    tail_capacity: int,
    num_contexts: int | None,
    max_context_len: int | None,
) -> EngineShape:
    if not artifacts:
        raise ConfigError("an engine needs at least one artifact")
    configs = {artifact.spec.index_config for artifact in artifacts}
    if len(configs) > 1:
        raise ConfigError("the artifacts have different index configurations; start an engine for each")
    geometry, index_config = loaded.geometry, artifacts[0].spec.index_config
    longest = max_context_len or max(artifact.spec.context_len for artifact in artifacts)
    return EngineShape(
        num_layers=geometry.num_layers,
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        num_index_heads=artifacts[0].layer_index(0).num_heads,
        head_dim=geometry.head_dim,
        dtype=loaded.dtype,
        softmax_scale=loaded.model.model.layers[0].self_attn.scaling,
        search=config,
        max_context_len=longest,
        batch_sizes=batch_sizes,
        num_contexts=max(num_contexts or 0, len(artifacts)),
        num_tails=num_tails,
        tail_capacity=min(tail_capacity, geometry.max_positions),
        rest=resolve_rest(config, "csattn", index_config.layout),
        max_segments=len(index_config.segment_starts(longest)) if isinstance(index_config, SketchConfig) else 0,
    )


def _room_for_next_query(shape: EngineShape, device: torch.device) -> Tensor:
    """[num_contexts, num_layers, num_q_heads, head_dim + 1, head_dim]; of the last layer nothing is read."""
    sizes = shape.num_contexts, shape.num_layers, shape.num_q_heads, shape.head_dim + 1, shape.head_dim
    return torch.zeros(sizes, dtype=shape.dtype, device=device)
