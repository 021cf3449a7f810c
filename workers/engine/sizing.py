"""From what an engine on a GPU is set to, to the sizes that its memory is planned for."""

from dataclasses import dataclass, replace
from math import prod

from csattn.config import SEGMENT_STEP, IndexConfig, ListConfig, SearchConfig, SketchConfig, num_index_heads
from csattn.errors import ConfigError
from csattn.models.spec import ModelSpec
from csattn.selectors import ContextView, resolve_rest, selector_for
from csattn.sketch.own import Growth, own_top_k
from offload.budget import AvailableMemory, MemoryPlan
from offload.codecs.formats import KvFormat
from offload.slot_cache import max_slots
from workers.engine.memory import Placement, plan_memory
from workers.engine.own_choice import latents_of, least_slots
from workers.engine.shape import EngineShape
from workers.engine.some_or_all import require_both, require_model
from workers.engine.step_model import StepModel
from workers.serving.messages import Selector

LEAST_OWN_ROWS = 2048
OWN_PART_OF_DEVICE, OWN_PART_OF_HOST = 8, 4  # one of so many parts of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Settings, named as `GpuEngine` takes them. Contexts tell the rest: their index, and how long they are."""

    model: StepModel
    placement: Placement
    search: SearchConfig
    selector: Selector
    batch_sizes: tuple[int, ...]
    num_contexts: int
    max_context_len: int | None
    num_tails: int
    tail_capacity: int | None  # rows of a request's own; None: see `settle`, of the next, too
    own_on_host: bool | None  # whether the first of them are, if steps can do so and placement is not device
    growth: Growth
    slot_share: float
    kv_format: KvFormat | None
    all_where_faster: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.slot_share <= 1:
            raise ConfigError(f"slot_share must lie in (0, 1], got {self.slot_share}")
        if self.kv_format is not None:
            self.kv_format.row_bytes(self.model.spec.head_dim)  # which it may not fit
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
        """Rows of a context, per layer and KV head, that are kept on the device where its KV is on the host."""
        latent = latents_of(self.model.spec)
        least = 1 if latent is None else least_slots(latent, longest, self.batch_sizes[-1])
        return max(least, min(max_slots(), int(self.slot_share * longest)))

    def settle(self, index_config: IndexConfig, available: AvailableMemory) -> "Sizing":
        """With what was left to the memory: where requests' own rows are, and how many.

        They stay on the device where they are as many there. As many: as were said, or as the model has positions,
        halved until those of all requests take a part of the memory, but `LEAST_OWN_ROWS`.
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
        return max(sized, key=lambda each: each.tail_capacity or 0)  # of as many the first

    def fits(self, index_config: IndexConfig, available: AvailableMemory) -> bool:
        """Whether requests' own rows take no more than their part of the memory."""
        planned, without = (each._planned(index_config) for each in (self, replace(self, tail_capacity=1)))
        on_device = (available.device_bytes - without.device_bytes) // OWN_PART_OF_DEVICE
        on_host = (available.host_bytes - without.pinned_bytes) // OWN_PART_OF_HOST
        more_on_host = planned.pinned_bytes - without.pinned_bytes
        return planned.device_bytes - without.device_bytes <= on_device and more_on_host <= on_host

    def _planned(self, index_config: IndexConfig) -> MemoryPlan:
        """Of what contexts do not change."""
        shape, num_slots = self.shape(index_config, 1), self.num_cached(1)
        return plan_memory(self.model.num_bytes, index_config, shape, self.placement, num_slots)

    def longest(self, index_config: IndexConfig, needed: int, available_bytes: int) -> int:
        """As many rows as the model has positions, halved until what grows with them takes half of what is left.

        available_bytes: on the device, now.
        """

        def planned_bytes(longest: int) -> int:
            shape, num_slots = self.shape(index_config, longest), self.num_cached(longest)
            return plan_memory(self.model.num_bytes, index_config, shape, self.placement, num_slots).device_bytes

        longest, least = self.model.spec.max_positions, planned_bytes(1)
        room = (available_bytes - least) // 2
        if self.placement != "device":  # a cache has room for so many, whatever memory there is
            while longest > max(needed, 1) and self.slot_share * longest > max_slots():
                longest //= 2
        while longest > max(needed, 1) and planned_bytes(longest) > least + room:
            longest //= 2
        return max(longest, needed)

    def shape(self, index_config: IndexConfig, longest: int) -> EngineShape:
        """longest: rows of a context, at most."""
        spec = self.model.spec
        assert self.tail_capacity is not None, "see `settle`"
        all_rows = EngineShape(  # attended to in all layers
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
        if (latent := latents_of(spec)) is not None:  # a row is one KV head's; what is chosen is the model's affair
            return replace(all_rows, latents=latent)
        if spec.compressed:
            return replace(all_rows, compressed=spec.compressed)
        attention = spec.layers[spec.indexed_layers[0]].attention
        selector = self.selector
        if isinstance(index_config, ListConfig):  # which name not all keys; by a sketch all can be chosen, or fewer
            selector = selector_for(selector, ContextView(longest, spec.softmax_scale, self.search))
        heads = num_index_heads(index_config, spec.num_q_heads, spec.num_kv_heads)
        shape = replace(
            all_rows,
            num_layers=len(spec.indexed_layers),
            num_index_heads=heads if selector == "csattn" else spec.num_kv_heads,
            rest=resolve_rest(self.search, selector, index_config.layout, attention.logit_cap is not None),
            attends_all=selector == "full",
            some_or_all=self.all_where_faster and selector != "full",  # which lists may come down to
            reads_keys=selector == "exact",
            kv_format=self.kv_format,
            growth=self.growth,
            logit_cap=attention.logit_cap,
            has_sinks=attention.sinks,
            local=tuple(x for x in (layer.attention.reach for layer in spec.layers) if x is not None),
            local_heads=spec.local_heads,
            lenders=_lenders(spec),
            state_bytes=sum(4 * prod(part) for layer in spec.layers if layer.delta for part in layer.delta.parts),
            max_segments=len(index_config.segment_starts(longest)) if isinstance(index_config, SketchConfig) else 0,
        )
        kept = self.growth.segment_len + shape.near_len + self.batch_sizes[-1]
        grow_all = shape.max_own_segments and not self.search.lookahead  # without a context, too
        if self.placement == "device" or not self.own_on_host or not grow_all or kept >= self.tail_capacity:
            return shape
        chosen = own_top_k(self.search, self.tail_capacity)
        own_slots = min(max_slots(), max(chosen, int(self.slot_share * self.tail_capacity)))
        return replace(shape, tail_capacity=kept, own_capacity=self.tail_capacity, own_slots=own_slots)


def _lenders(spec: ModelSpec) -> tuple[int, ...]:
    """By numbers of indexed layers: those whose rows each of them attends to."""
    indexed = spec.indexed_layers
    rows_of = {i: spec.layers[i].attention.rows_of for i in indexed}
    return tuple(indexed.index(i if at is None else at) for i, at in rows_of.items()) if spec.lenders else ()
