"""A model and its contexts on a GPU, ready to decode: memory is planned first, then everything is loaded, once."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.search import SearchPool
from csattn.search.device import IndexShape, to_device
from offload.budget import available_memory
from offload.errors import NoDeviceError
from offload.pinned import PinnedRows
from workers.engine.far_rows import CachedRows, DeviceRows
from workers.engine.memory import Placement, placement_named, plan_memory
from workers.engine.on_device import SearchOnDevice
from workers.engine.on_host import SearchOnHost
from workers.engine.shape import EngineShape
from workers.model_runner import ModelRunner, take_weights

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
        artifacts: Sequence[Artifact],  # each becomes the context of its number; open as long as the engine is
        config: SearchConfig,
        placement: Placement | str,
        *,
        device: torch.device | None = None,
        batch_sizes: tuple[int, ...] = BATCH_SIZES,
        num_tails: int = 1,
        tail_capacity: int = TAIL_CAPACITY,
        slot_share: float = SLOT_SHARE,
        num_threads: int | None = None,  # that search, in placement `host`; all cores unless said
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        if not 0 < slot_share <= 1:
            raise ConfigError(f"slot_share must lie in (0, 1], got {slot_share}")
        _require_device()
        self.device = device or torch.device("cuda", 0)
        for artifact in artifacts:
            artifact.require_model(loaded.fingerprint)
            artifact.require_tokenizer(loaded.tokenizer_hash)
        self.loaded, self.artifacts, self.placement = loaded, list(artifacts), placement_named(placement)
        self.shape = _engine_shape(loaded, self.artifacts, config, batch_sizes, num_tails, tail_capacity)
        self._num_slots = max(1, int(slot_share * self.shape.max_context_len))
        self.plan = plan_memory(loaded, self.artifacts, self.shape, self.placement, self._num_slots)
        self.plan.require(available_memory(self.device))
        self._on_progress = on_progress
        self._pinned: list[PinnedRows] = []
        self._pool = SearchPool(num_threads or available_cpus()) if self.placement == "host" else None
        self.attention = self._place()
        self.runner = ModelRunner(
            take_weights(loaded.model, self.device),
            self.attention,
            self.shape.batch_sizes,
            _next_queries(self.artifacts, self.device) if config.lookahead else None,
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
        torch.cuda.synchronize(self.device)
        for pinned in self._pinned:
            pinned.close()
        if self._pool is not None:
            self._pool.close()

    def _place(self) -> SearchOnDevice | SearchOnHost:
        index = IndexShape.of(self.artifacts[0].layer_index(0), self.shape.num_q_heads)
        if self.placement == "device":
            rows = DeviceRows(self.shape, self.device)
            on_device = SearchOnDevice(self.shape, index, rows, self.device)
            for context_id, artifact in enumerate(self.artifacts):
                rows.load(context_id, self._layers_of(artifact))
                self._load_index(on_device, context_id, self._layers_of(artifact))
            return on_device
        cached = CachedRows(self.shape, self._num_slots, self.device)
        if self._pool is None:
            on_device = SearchOnDevice(self.shape, index, cached, self.device)
            for context_id in range(len(self.artifacts)):
                self._load_index(on_device, context_id, self._pin(context_id, cached).layers)
            return on_device
        on_host = SearchOnHost(self.shape, cached, self._pool, self.device)
        for context_id, artifact in enumerate(self.artifacts):
            indexes = [artifact.layer_index(layer_idx) for layer_idx in range(self.shape.num_layers)]
            on_host.load(context_id, self._pin(context_id, cached).layers, indexes)
        return on_host

    def _layers_of(self, artifact: Artifact) -> list[Tensor]:
        return [artifact.layer_kv(layer_idx) for layer_idx in range(self.shape.num_layers)]

    def _pin(self, context_id: int, cached: CachedRows) -> PinnedRows:
        def tell(done: int, total: int) -> None:
            self._on_progress("pinning host memory", done, total)

        pinned = PinnedRows(self._layers_of(self.artifacts[context_id]), progress=tell)
        self._pinned.append(pinned)
        cached.load(context_id, pinned)
        return pinned

    def _load_index(self, attention: SearchOnDevice, context_id: int, kv: Sequence[Tensor]) -> None:
        layers = []
        for layer_idx in range(self.shape.num_layers):
            layers.append(to_device(self.artifacts[context_id].layer_index(layer_idx), self.device))
            self._on_progress("loading the index", layer_idx + 1, self.shape.num_layers)
        attention.load(context_id, kv, layers)


def _require_device() -> None:
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "this machine has no CUDA device, or torch is a build without CUDA; leave out the placement to decode on "
            "the CPU"
        )
    if find_spec("cupy") is None:
        raise NoDeviceError("the GPU engine needs CuPy, which is not installed: pip install 'csattn[gpu]'")


def _engine_shape(
    loaded: LoadedModel,
    artifacts: Sequence[Artifact],
    config: SearchConfig,
    batch_sizes: tuple[int, ...],
    num_tails: int,
    tail_capacity: int,
) -> EngineShape:
    if not artifacts:
        raise ConfigError("an engine needs at least one artifact")
    configs = {artifact.spec.index_config for artifact in artifacts}
    if len(configs) > 1:
        raise ConfigError("the artifacts have different index configurations; start an engine for each")
    geometry = loaded.geometry
    return EngineShape(
        num_layers=geometry.num_layers,
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        num_index_heads=artifacts[0].layer_index(0).num_heads,
        head_dim=geometry.head_dim,
        dtype=loaded.dtype,
        softmax_scale=loaded.model.model.layers[0].self_attn.scaling,
        search=config,
        max_context_len=max(artifact.spec.context_len for artifact in artifacts),
        batch_sizes=batch_sizes,
        num_contexts=len(artifacts),
        num_tails=num_tails,
        tail_capacity=min(tail_capacity, geometry.max_positions),
    )


def _next_queries(artifacts: Sequence[Artifact], device: torch.device) -> Tensor:
    """[num_contexts, num_layers, num_q_heads, head_dim + 1, head_dim]; of the last layer nothing is read."""
    contexts = []
    for artifact in artifacts:
        layers: list[Tensor] = []
        for layer_idx in range(artifact.spec.model.num_layers):
            matrix = artifact.layer_index(layer_idx).next_query
            layers.append(torch.zeros_like(layers[0]) if matrix is None and layers else torch.tensor(matrix))
        contexts.append(torch.stack(layers))
    return torch.stack(contexts).to(device)
