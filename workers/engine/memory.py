"""What an engine will take of the device's and the host's memory, told before anything is allocated."""

from collections.abc import Sequence
from typing import Literal, get_args

from csattn.artifact import Artifact
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from offload.budget import MemoryPart, MemoryPlan
from workers.engine.far_rows import cache_bytes
from workers.engine.shape import EngineShape

Placement = Literal["device", "hybrid", "host"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
KERNELS_BYTES = 512 << 20  # code, graphs and what torch sets aside for matrix products


def placement_named(name: str) -> Placement:
    """Raises ConfigError when there is none of that name."""
    for placement in PLACEMENTS:
        if placement == name:
            return placement
    raise ConfigError(f"unknown placement {name!r}; choose one of {', '.join(PLACEMENTS)}")


def plan_memory(
    loaded: LoadedModel,
    artifacts: Sequence[Artifact],
    shape: EngineShape,
    placement: Placement,
    num_slots: int,  # of the slot cache, where the placement has one
) -> MemoryPlan:
    """The parts of an engine, each with its bytes."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    kv_bytes = sum(shape.kv_bytes(artifact.spec.context_len) for artifact in artifacts)
    index_bytes = sum(artifact.index_bytes for artifact in artifacts)
    working = search_bytes(shape) if placement != "host" else 0
    parts = [
        MemoryPart(name="the model's weights", device_bytes=weights if loaded.device.type == "cpu" else 0),
        MemoryPart(name="the requests' own KV", device_bytes=shape.tails_bytes),
        MemoryPart(name="the resident rows", device_bytes=shape.resident_bytes),
        MemoryPart(name="the moments of the rows between", device_bytes=shape.moments_bytes),
        MemoryPart(name="kernels and their workspace", device_bytes=KERNELS_BYTES + working),
    ]
    if placement != "host":
        parts.append(MemoryPart(name="the index", device_bytes=index_bytes))
    if placement == "device":
        parts.append(MemoryPart(name="the context's KV", device_bytes=kv_bytes))
    else:
        parts.append(MemoryPart(name="the context's KV", pinned_bytes=kv_bytes))
        parts.append(MemoryPart(name="the slot cache", device_bytes=cache_bytes(shape, num_slots)))
    return MemoryPlan(tuple(parts), shape.max_context_len)


def plan_context(shape: EngineShape, artifact: Artifact, placement: Placement) -> MemoryPlan:
    """What one more context takes, its resident rows and slots aside: an engine has them from the start."""
    kv_bytes = shape.kv_bytes(artifact.spec.context_len)
    kv = {"device_bytes": kv_bytes} if placement == "device" else {"pinned_bytes": kv_bytes}
    parts = [MemoryPart(name="the context's KV", **kv)]
    if placement != "host":
        parts.append(MemoryPart(name="the index", device_bytes=artifact.index_bytes))
    return MemoryPlan(tuple(parts), shape.max_context_len)


def search_bytes(shape: EngineShape) -> int:
    """Workspace of the searches of all batch sizes: two bytes for each key and query head, selections, statistics."""
    keys = sum(shape.batch_sizes) * shape.num_q_heads * (shape.max_context_len + 1024)
    selections = 2 * sum(shape.batch_sizes) * shape.num_index_heads * shape.max_top_k * 4
    return keys * (4 if shape.num_index_heads == shape.num_q_heads else 2) + keys // 32 + selections
