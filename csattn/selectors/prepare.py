"""From a selector's name to what it makes of a layer of a context."""

from collections.abc import Callable
from functools import partial

from csattn.errors import ConfigError
from csattn.selector_names import ABOUT, SELECTOR_NAMES, SelectorName
from csattn.selectors.base import ContextLayer, ContextView, Prepared, Unprepared
from csattn.selectors.exact import ExactSelector
from csattn.selectors.fixed import FullSelector, WindowSelector
from csattn.selectors.h2o import PreparedH2o
from csattn.selectors.loki import PreparedLoki
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.quest import PreparedQuest
from csattn.selectors.sparq import PreparedSparq
from csattn.selectors.top_p import TopPSelector

# all but `csattn`, whose index the artifact holds
_FACTORIES: dict[SelectorName, Callable[[ContextLayer], Prepared]] = {
    "exact": partial(Unprepared, make=ExactSelector),
    "top_p": partial(Unprepared, make=TopPSelector),
    "quest": PreparedQuest,
    "sparq": PreparedSparq,
    "loki": PreparedLoki,
    "pqcache": PreparedPqcache,
    "magicpig": PreparedMagicpig,
    "h2o": PreparedH2o,
    "window": partial(Unprepared, make=WindowSelector),
    "full": partial(Unprepared, make=FullSelector),
}

_CHOOSE_THE_BEST: tuple[SelectorName, ...] = ("csattn", "exact")  # by logit, or nearly so


def prepare(name: SelectorName, layer: ContextLayer) -> Prepared:
    """What that selector makes of a layer of a context, with the options of its paper; `csattn` needs its index."""
    return _FACTORIES[name](layer)


def selector_for(name: str, view: ContextView) -> SelectorName:
    """The selector that does what was asked for: `full`, where everything is kept anyway.

    Raises ConfigError for a name that is not one.
    """
    if name not in SELECTOR_NAMES:
        raise ConfigError(f"unknown selector {name!r}; choose one of {', '.join(SELECTOR_NAMES)}")
    return "full" if view.everything_kept and ABOUT[name].keeps_top_k else name


def estimates_rest(name: SelectorName, view: ContextView) -> bool:
    """Whether attention to the rows that it leaves out is estimated: `csattn.rest` takes its rows for the best.

    Raises ConfigError where that is asked for of a selector of another kind; `full` leaves nothing out.
    """
    if view.config.estimate_rest and name not in (*_CHOOSE_THE_BEST, "full"):
        raise ConfigError(
            f"estimate_rest goes with the selectors {' and '.join(_CHOOSE_THE_BEST)}; {name} works as it was "
            "published: choose one of those, or leave estimate_rest out"
        )
    return view.config.estimate_rest and name != "full"
