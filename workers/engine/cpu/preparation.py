"""What requests of one kind need computed from a whole context: made once, and kept as long as the context."""

from collections.abc import Callable
from dataclasses import dataclass

from csattn.config import RestKind, SketchConfig
from csattn.models import LoadedModel
from csattn.rest import Moments
from csattn.search import SearchPool
from csattn.selector_names import SelectorName
from csattn.selectors import (
    CentroidSelector,
    ContextView,
    Prepared,
    Selector,
    index_bytes,
    predictor_bytes,
    prepare,
    search_bytes,
)
from csattn.sketch import SketchIndex
from offload.budget import require_host_memory
from workers.context_layers import context_layers
from workers.engine.cpu.context import WITHOUT_ALL_KEYS, CpuContext, CpuRequest
from workers.engine.own_segments import OwnSegments


@dataclass(frozen=True, slots=True)
class Preparation:
    """What requests of one kind over one context need, and how they begin once it is made."""

    context_id: int
    context: CpuContext
    view: ContextView
    selector: SelectorName  # full if all rows are kept anyway
    rest: RestKind  # how rows that are not chosen are attended to
    own_sketch: SketchConfig | None  # how requests' own rows are coded; None: not at all

    @property
    def is_made(self) -> bool:
        """Whether nothing is left to make. May be read without a lock while another thread makes it."""
        has_selector = not self._has_selector or self.selector in self.context.prepared
        return has_selector and (self.rest != "moments" or self._rows in self.context.moments)

    def make(self, loaded: LoadedModel) -> None:
        """Make what is missing; it may take as long as a prefill. One thread at a time: the model may run, with hooks.

        Raises MemoryPlanError if it does not fit into memory.
        """
        if self._has_selector and self.selector not in self.context.prepared:
            self.context.prepared[self.selector] = self._prepare_layers(loaded)
        if self.rest == "moments" and self._rows not in self.context.moments:
            self.context.moments[self._rows] = self.context.moments_of(self.view.middle)

    def begin(
        self, request_slot: int, num_q_heads: int, pool: Callable[[], SearchPool], own: OwnSegments | None
    ) -> CpuRequest:
        """Return a new request. pool: of searches in lists that hold own rows; own: its segments, if it has any."""
        context, indexes = self.context, self.context.indexes
        sketches: list[SketchIndex] = context.sketches if self.rest == "sketch" else []
        moments: list[Moments] = context.moments[self._rows] if self.rest == "moments" else []
        searched = indexes if self.selector == "csattn" else []
        prepared = context.prepared[self.selector] if self._has_selector else []

        def make_selectors() -> list[Selector]:
            if self._has_selector:
                return [layer.selector(self.view) for layer in prepared]
            lists = [index for index in indexes if not isinstance(index, SketchIndex)]
            return [CentroidSelector(index, pool(), num_q_heads, self.view) for index in lists]

        looks_ahead = (self._has_selector or self.selector == "csattn") and bool(self.view.config.lookahead)
        predictors = [predictor_bytes(index) for index in indexes] if looks_ahead else []
        indexed = [index_bytes(index) for index in searched] + [layer.index_bytes for layer in prepared]
        rest_bytes = sum(layer.num_bytes for layer in sketches) + sum(layer.num_bytes for layer in moments)
        shares_sketch = self.selector == "csattn" and self.rest == "sketch"  # then it counts as the index
        return CpuRequest(
            request_slot,
            context,
            self.view,
            self.selector,
            make_selectors,
            sketches,
            moments,
            index_bytes=sum(indexed) + sum(predictors) + (0 if shares_sketch else rest_bytes),
            search_bytes=sum(search_bytes(index, num_q_heads) for index in searched) + sum(predictors),
            predictor_bytes=max(predictors, default=0),
            rest_bytes=rest_bytes,
            own=own,
            context_id=self.context_id,
            context_len=self.view.context_len,
        )

    def _prepare_layers(self, loaded: LoadedModel) -> list[Prepared]:
        """Prepare all layers. Checks memory after the first one, assuming that the others take as much each."""
        assert self.context.artifact is not None, "without a context nothing is chosen"
        first, *others = context_layers(loaded, self.context.artifact)
        prepared = prepare(self.selector, first)
        remedy = "choose another selector, or a shorter context"
        what = f"the data that {self.selector} computes from the context"
        require_host_memory(what, len(others) * prepared.index_bytes, remedy)
        return [prepared, *(prepare(self.selector, layer) for layer in others)]

    @property
    def _has_selector(self) -> bool:
        return self.selector not in WITHOUT_ALL_KEYS

    @property
    def _rows(self) -> tuple[int, int]:
        """The range of rows that may be chosen."""
        middle = self.view.middle
        return middle.start, middle.stop
