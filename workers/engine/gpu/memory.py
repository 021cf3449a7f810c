"""Plans how much device and host memory an engine will take, before anything is allocated."""

from typing import Literal, get_args

import torch

from csattn.artifact import Artifact
from csattn.attention.device import require_supported
from csattn.batch import make_device_selection
from csattn.config import IndexConfig, SketchConfig
from csattn.errors import ConfigError
from csattn.models.description import describe
from csattn.models.loader import DTYPES, read_config
from csattn.models.spec import ModelSpec
from csattn.models.weight_sizes import weight_bytes
from csattn.search.device import (
    ListsPass,
    SketchPass,
    SketchShape,
    exact_bytes,
    index_shape,
    workspace_bytes,
)
from csattn.sketch.codes import num_coords
from offload.budget import MemoryPart, MemoryPlan, available_memory
from workers.engine.gpu.attend_all import attend_all_bytes, streamed_bytes
from workers.engine.gpu.attend_chosen import make_passes
from workers.engine.gpu.compressed_memory import compressed_bytes, compressed_working_bytes
from workers.engine.gpu.far_rows import cache_bytes
from workers.engine.gpu.latent_memory import index_key_bytes, latents_bytes, latents_working_bytes
from workers.engine.gpu.on_device import make_searches
from workers.engine.gpu.own_on_device import own_bytes, own_cache_bytes, own_shape
from workers.engine.gpu.schedule import schedule_bytes
from workers.engine.gpu.shape import EngineShape
from workers.engine.model_choice import model_selects_rows, require_choice_placed
from workers.model.devices import require_device

Placement = Literal["device", "hybrid", "host"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
KERNELS_BYTES = 512 << 20  # code, graphs, and torch's workspace for matrix products


def placement_named(name: str) -> Placement:
    """Return the placement of that name. Raises ConfigError if there is none."""
    for placement in PLACEMENTS:
        if placement == name:
            return placement
    raise ConfigError(f"unknown placement {name!r}; choose one of {', '.join(PLACEMENTS)}")


def plan_memory(
    weights_bytes: int,
    index_config: IndexConfig,
    shape: EngineShape,
    placement: Placement,
    num_cache_slots: int,  # of the slot cache, where the placement has one
    first: Artifact | None = None,  # a context that will be loaded
) -> MemoryPlan:
    """Return the parts of an engine, each with its bytes."""
    working = search_bytes(shape, index_config, placement)
    if shape.latents is not None:
        working = latents_working_bytes(shape)
    elif shape.compressed:
        working = compressed_working_bytes(shape)
    elif shape.attends_all or shape.sparse_or_full:
        working += attend_all_bytes(shape)
    kept = 0 if shape.attends_all else schedule_bytes(shape)
    parts = [
        MemoryPart(name="the model's weights", device_bytes=weights_bytes),
        MemoryPart(
            name="the requests' own KV",
            device_bytes=0 if shape.compressed else shape.tails_bytes,
            pinned_bytes=shape.moved_bytes,
        ),
        MemoryPart(name="the slot cache of the requests' own KV", device_bytes=own_cache_bytes(shape)),
        MemoryPart(name="the codes of the requests' own KV", device_bytes=_own_bytes(shape, index_config)),
        MemoryPart(name="the resident rows", device_bytes=shape.resident_bytes),
        MemoryPart(name="the layers without an index", device_bytes=shape.local_bytes),
        MemoryPart(name="the moments of the rows that are not read", device_bytes=shape.moments_bytes),
        MemoryPart(name="the choices that later tokens reuse", device_bytes=kept),
        MemoryPart(name="the predictors of the next layer's queries", device_bytes=shape.next_query_bytes),
        MemoryPart(name="kernels and their workspace", device_bytes=KERNELS_BYTES + working),
    ]
    if shape.latents is not None and placement == "device":
        parts.append(MemoryPart(name="the contexts' latents", device_bytes=latents_bytes(shape)))
    elif shape.compressed:
        name = "the contexts' compressed rows, and requests' own"
        parts.append(MemoryPart(name=name, device_bytes=compressed_bytes(shape)))
    elif placement != "device" and shape.attends_all and shape.latents is None:
        parts.append(MemoryPart(name="the layers that are streamed", device_bytes=streamed_bytes(shape)))
    elif placement != "device":
        parts.append(MemoryPart(name="the slot cache", device_bytes=cache_bytes(shape, num_cache_slots)))
        if shape.latents is not None:
            parts.append(MemoryPart(name="the contexts' index keys", device_bytes=index_key_bytes(shape)))
    if first is not None:
        parts += plan_context(shape, first, placement).parts
    return MemoryPlan(tuple(parts), shape.max_context_len)


def require_weights(
    name: str | None,
    dtype: str,
    weights: str | None,  # all as `load_model` takes them
    placement: Placement | str,
) -> None:
    """Raise, before a model is loaded, if it cannot be decoded there, or if its weights alone exceed the device."""
    config = read_config(name, dtype)
    spec = describe(config)
    require_choice_placed(spec, placement)
    require_heads(spec, DTYPES[dtype])
    size = weight_bytes(config, DTYPES[dtype].itemsize, weights)
    if dtype != "bfloat16" and size.quantized:
        raise ConfigError(
            f"a GPU multiplies weights of 8 or 4 bits with bfloat16, not with {dtype}; "
            "build the context with --dtype bfloat16, and serve with --set build.dtype=bfloat16"
        )
    require_device()
    needed = {"the model's weights": size.on_gpu, "kernels and their workspace": KERNELS_BYTES}
    parts = tuple(MemoryPart(name=part, device_bytes=num_bytes) for part, num_bytes in needed.items())
    MemoryPlan(parts, 0).require(available_memory(torch.device("cuda")))


def require_heads(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError for heads that the attention kernels on a GPU do not support."""
    if not model_selects_rows(spec):
        for heads in {spec.heads, *map(spec.heads_of, range(spec.num_layers))}:
            require_supported(heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.head_dim, dtype)


def _own_bytes(shape: EngineShape, config: IndexConfig) -> int:
    """Bytes of the sketches of own segments, and of their search's workspace."""
    if not shape.max_own_segments or not isinstance(config, SketchConfig):
        return 0
    words = config.words(shape.head_dim)
    searching = search_bytes(own_shape(shape), config, "device")
    return own_bytes(shape, sum(words), num_coords(*words)) + searching


def plan_context(shape: EngineShape, artifact: Artifact, placement: Placement) -> MemoryPlan:
    """Plan one more context, without resident rows, slots and latents, which an engine allocates from the start."""
    if shape.compressed or (shape.latents is not None and placement == "device"):
        return MemoryPlan((), shape.max_context_len)
    kv_bytes = shape.kv_bytes(artifact.spec.context_len)
    kv = {"device_bytes": kv_bytes} if placement == "device" else {"pinned_bytes": kv_bytes}
    parts = [MemoryPart(name="the context's KV", **kv)]
    if index_is_on_device(shape, placement):
        parts.append(MemoryPart(name="the index", device_bytes=artifact.index_bytes))
    return MemoryPlan(tuple(parts), shape.max_context_len)


def index_is_on_device(shape: EngineShape, placement: Placement) -> bool:
    """Whether the index is on the device: to search there, or to attend to the rest by codes."""
    return not shape.attends_all and (placement != "host" or shape.rest == "sketch")


def search_bytes(shape: EngineShape, config: IndexConfig, placement: Placement) -> int:
    """Workspace of the searches of all batch sizes, and of attention to the rest: what they allocate, counted on the
    meta device."""
    if shape.attends_all:
        return 0
    index, nowhere = index_shape(config, shape.num_q_heads, shape.num_kv_heads, shape.head_dim), torch.device("meta")
    selections = shape.num_index_heads, shape.max_top_k, nowhere
    chosen = [make_device_selection(size, *selections) for size in shape.batch_sizes for _ in range(2)]
    passes: list[SketchPass | ListsPass] = []
    of_keys = exact_bytes(shape.rows, shape.batch_sizes, shape.max_context_len) if shape.reads_keys else 0
    if placement != "host" and not shape.reads_keys:
        passes += [search.scores for search in make_searches(shape, index, nowhere).values()]
    if shape.has_separate_rest_pass or (placement == "host" and shape.rest == "sketch"):
        assert isinstance(index, SketchShape)
        passes += make_passes(shape, index, nowhere).values()
    of_choices = sum(selection.kv_indices.nbytes + selection.valid_len.nbytes for selection in chosen)
    return of_choices + of_keys + sum(map(workspace_bytes, passes))
