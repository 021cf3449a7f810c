"""What requests of one kind need of a whole context besides its artifact: made once, kept as long as the context."""

from dataclasses import dataclass

from csattn.config import RestKind
from csattn.models import LoadedModel
from csattn.rest import Moments
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, Prepared, Selector, prepare
from csattn.sketch import SketchIndex
from offload.budget import require_host_memory
from workers.context_layers import context_layers
from workers.engine.cpu_context import CpuContext


@dataclass(frozen=True, slots=True)
class Preparation:
    """Requests of one kind over one context: with what they begin, once it is made."""

    context: CpuContext
    view: ContextView
    selector: SelectorName  # full where everything is kept anyway
    rest: RestKind  # how rows that are not chosen are attended to

    @property
    def is_made(self) -> bool:
        """Asked without a lock, while another thread makes it."""
        has_selector = not self._chooses_alone or self.selector in self.context.prepared
        return has_selector and (self.rest != "moments" or self._rows in self.context.moments)

    def make(self, loaded: LoadedModel) -> None:
        """May take as long as a prefill. On one thread at a time: the model may run, hooked.

        Raises MemoryPlanError where there is no memory for it.
        """
        if self._chooses_alone and self.selector not in self.context.prepared:
            self.context.prepared[self.selector] = self._prepare_layers(loaded)
        if self.rest == "moments" and self._rows not in self.context.moments:
            self.context.moments[self._rows] = self.context.moments_of(self.view.middle)

    def selectors(self) -> list[Selector] | None:
        """For a new request, per layer; None where its rows are chosen together or not at all."""
        if not self._chooses_alone:
            return None
        return [prepared.selector(self.view) for prepared in self.context.prepared[self.selector]]

    def sketches(self) -> list[SketchIndex]:
        """Per layer; none where the rest is not attended to by codes."""
        return self.context.sketches if self.rest == "sketch" else []

    def moments(self) -> list[Moments]:
        """Per layer; none where the rest is not estimated by them."""
        return self.context.moments[self._rows] if self.rest == "moments" else []

    def _prepare_layers(self, loaded: LoadedModel) -> list[Prepared]:
        """What the first layer takes, the others will."""
        first, *others = context_layers(loaded, self.context.artifact)
        prepared = prepare(self.selector, first)
        remedy = "choose another selector, or a shorter context"
        what = f"what {self.selector} makes of the context"
        require_host_memory(what, len(others) * prepared.index_bytes, remedy)
        return [prepared, *(prepare(self.selector, layer) for layer in others)]

    @property
    def _chooses_alone(self) -> bool:
        return self.selector not in ("csattn", "full", "window")

    @property
    def _rows(self) -> tuple[int, int]:
        """That may be chosen."""
        middle = self.view.middle
        return middle.start, middle.stop
