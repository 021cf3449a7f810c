"""From the settings of an engine on a GPU to the sizes that its memory is planned for."""

from dataclasses import dataclass, replace
from math import prod

from csattn.config import SEGMENT_STEP, IndexConfig, ListConfig, SearchConfig, SketchConfig, num_index_heads
from csattn.errors import ConfigError
from csattn.models.spec import ModelSpec
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, resolve_rest, selector_for
from csattn.sketch.own import Growth, own_top_k
from offload.budget import AvailableMemory, MemoryPlan
from offload.codecs.formats import KvFormat
from offload.errors import OffloadError
from offload.slot_cache import max_slots
from workers.engine.gpu.memory import Placement, plan_memory
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.sparse_or_full import require_both, require_model
from workers.engine.gpu.step_model import StepModel
from workers.engine.model_choice import latents_of, least_slots

LEAST_OWN_ROWS = 2048
OWN_PART_OF_DEVICE, OWN_PART_OF_HOST = 8, 4  # own rows take at most 1/8 and 1/4 of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Settings, named as `GpuEngine` takes them. The sizes also depend on contexts: on their index and length."""

    model: StepModel
    placement: Placement
    search: SearchConfig
    selector: SelectorName
    batch_sizes: tuple[int, ...]
    num_contexts: int
    max_context_len: int | None
    num_tails: int
    tail_capacity: int | None  # own rows of a request; None, here and below: `settle` decides
    own_on_host: bool | None  # whether the first own rows move, if steps support it and placement is not device
    growth: Growth
    slot_share: float
    kv_format: KvFormat | None
    all_where_faster: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.slot_share <= 1:
            raise ConfigError(f"slot_share must be more than 0 and at most 1, got {self.slot_share}")
        if self.kv_format is not None:
            self.kv_format.row_bytes(self.model.spec.head_dim)  # raises if it does not fit
        if self.all_where_faster:
            require_both(self.placement, self.selector, self.search, self.kv_format)
            require_model(self.model.spec, self.model.dtype)
        max_rows = self.batch_sizes[-1]
        if self.growth.segment_len % SEGMENT_STEP or max_rows > self.growth.least_near:
            raise ConfigError(
                f"on a GPU, a request's own segments have multiples of {SEGMENT_STEP} rows, got "
                f"{self.growth.segment_len}, and steps up to {self.growth.least_near}, got {max_rows}"
            )

    def num_cached(self, longest: int) -> int:
        """Return how many cache slots a context has on the device, per layer and KV head, if its KV is on the host."""
        latent = latents_of(self.model.spec)
        least = 1 if latent is None else least_slots(latent, longest, self.batch_sizes[-1])
        return max(least, min(max_slots(), int(self.slot_share * longest)))

    def settle(self, index_config: IndexConfig, available: AvailableMemory) -> "Sizing":
        """Return these settings with tail_capacity and own_on_host decided by the available memory.

        Own rows stay on the device if as many of them fit there. tail_capacity is as given, or the number of the
        model's positions, halved until the own rows of all requests fit (see `fits`), but at least `LEAST_OWN_ROWS`.
        """
        most = self.model.spec.max_positions
        stay, move = replace(self, own_on_host=False), replace(self, own_on_host=True)
        if self.placement == "device" or self.own_on_host is False:
            places = [stay]
        else:
            places = [move] if self.own_on_host else [stay, move]
        if self.tail_capacity is not None:
            sized = [replace(place, tail_capacity=min(self.tail_capacity, most)) for place in places]
            return next((each for each in sized if each.fits(index_config, available)), sized[-1])
        sized = []
        for place in places:
            num_rows = most
            while num_rows > LEAST_OWN_ROWS:
                if replace(place, tail_capacity=num_rows).fits(index_config, available):
                    break
                num_rows = max(LEAST_OWN_ROWS, num_rows // 2)
            sized.append(replace(place, tail_capacity=num_rows))
        return max(sized, key=lambda each: each.tail_capacity or 0)  # of equals the first: own rows stay

    def fits(self, index_config: IndexConfig, available: AvailableMemory) -> bool:
        """Whether requests' own rows take no more than their part of the memory, and a slot cache supports them."""
        without = replace(self, tail_capacity=1)._planned(index_config)
        try:
            planned = self._planned(index_config)
        except OffloadError:
            return False
        on_device = (available.device_bytes - without.device_bytes) // OWN_PART_OF_DEVICE
        on_host = (available.host_bytes - without.pinned_bytes) // OWN_PART_OF_HOST
        more_on_host = planned.pinned_bytes - without.pinned_bytes
        return planned.device_bytes - without.device_bytes <= on_device and more_on_host <= on_host

    def _planned(self, index_config: IndexConfig, longest: int = 1) -> MemoryPlan:
        """Plan the memory. longest: 1 to compare settings that do not depend on contexts."""
        shape, num_cache_slots = self.shape(index_config, longest), self.num_cached(longest)
        return plan_memory(self.model.num_bytes, index_config, shape, self.placement, num_cache_slots)

    def longest(self, index_config: IndexConfig, needed: int, available_bytes: int) -> int:
        """Return the length of the longest context to plan for, at least `needed`.

        It is the number of the model's positions, halved until what grows with it takes at most half of the free
        memory, and a slot cache supports it. available_bytes: free on the device.
        """

        def is_too_long(longest: int) -> bool:
            try:
                return self._planned(index_config, longest).device_bytes > least + room
            except OffloadError:
                return True

        longest, least = self.model.spec.max_positions, self._planned(index_config).device_bytes
        room = (available_bytes - least) // 2
        if self.placement != "device":  # a slot cache has at most max_slots(), whatever the memory
            while longest > max(needed, 1) and self.slot_share * longest > max_slots():
                longest //= 2
        while longest > max(needed, 1) and is_too_long(longest):
            longest //= 2
        return max(longest, needed)

    def shape(self, index_config: IndexConfig, longest: int) -> EngineShape:
        """Return the sizes of an engine. longest: the most rows that a context may have."""
        spec = self.model.spec
        assert self.tail_capacity is not None, "see `settle`"
        all_rows = EngineShape(  # all rows are attended to in all layers
            num_layers=spec.num_layers,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            num_index_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.dtype,
            softmax_scale=spec.softmax_scale,
            search=self.search,
            max_context_len=longest,
            batch_sizes=self.batch_sizes,
            num_contexts=self.num_contexts,
            num_tails=self.num_tails,
            tail_capacity=self.tail_capacity,
            attends_all=True,
        )
        if (latent := latents_of(spec)) is not None:  # rows have one KV head, and the model itself chooses
            return replace(all_rows, latents=latent)
        if spec.compressed:
            return replace(all_rows, compressed=spec.compressed)
        attention = spec.layers[spec.indexed_layers[0]].attention
        selector = self.selector
        if isinstance(index_config, ListConfig):  # lists do not name all keys, so keep = 1 is full attention over them
            selector = selector_for(selector, ContextView(longest, spec.softmax_scale, self.search))
        heads = num_index_heads(index_config, spec.num_q_heads, spec.num_kv_heads)
        shape = replace(
            all_rows,
            num_layers=len(spec.indexed_layers),
            num_index_heads=heads if selector == "csattn" else spec.num_kv_heads,
            rest=resolve_rest(self.search, selector, index_config.layout, attention.logit_cap is not None),
            attends_all=selector == "full",
            sparse_or_full=self.all_where_faster and selector != "full",  # as it may be over lists
            reads_keys=selector == "exact",
            kv_format=self.kv_format,
            growth=self.growth,
            logit_cap=attention.logit_cap,
            has_sinks=attention.sinks,
            local=tuple(x for x in (layer.attention.reach for layer in spec.layers) if x is not None),
            local_heads=spec.local_heads,
            kv_sources=_kv_sources(spec),
            state_bytes=sum(4 * prod(part) for of in spec.layers if of.recurrent for part in of.recurrent.parts),
            max_segments=len(index_config.segment_starts(longest)) if isinstance(index_config, SketchConfig) else 0,
        )
        kept = self.growth.segment_len + shape.near_len + self.batch_sizes[-1]
        grow_all = shape.max_own_segments and not self.search.lookahead  # also requests without a context
        if self.placement == "device" or not self.own_on_host or not grow_all or kept >= self.tail_capacity:
            return shape
        chosen = own_top_k(self.search, self.tail_capacity)
        own_slots = min(max_slots(), max(chosen, int(self.slot_share * self.tail_capacity)))
        return replace(shape, tail_capacity=kept, own_capacity=self.tail_capacity, own_slots=own_slots)


def _kv_sources(spec: ModelSpec) -> tuple[int, ...]:
    """Return `EngineShape.kv_sources`: for each indexed layer, the number of the one whose rows it attends to."""
    indexed = spec.indexed_layers
    rows_of = {i: spec.layers[i].attention.rows_of for i in indexed}
    return tuple(indexed.index(i if at is None else at) for i, at in rows_of.items()) if spec.kv_sources else ()
