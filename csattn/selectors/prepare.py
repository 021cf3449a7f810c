"""From a selector's name to what it makes of a layer of a context, for selectors of csattn and of others."""

from collections.abc import Callable

from csattn.config import PRESET_NAMES, RestKind, SearchConfig
from csattn.errors import ConfigError
from csattn.selector_names import ABOUT, About, SelectorName, selector_named
from csattn.selectors.base import ContextLayer, ContextView, Prepared
from csattn.selectors.exact import PreparedExact
from csattn.selectors.h2o import PreparedH2o
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.quest import PreparedQuest
from csattn.selectors.sparq import PreparedSparq

# all but `csattn`, whose index the artifact holds, and `window` and `full`, which do not choose
_FACTORIES: dict[str, Callable[[ContextLayer], Prepared]] = {
    "exact": PreparedExact,
    "quest": PreparedQuest,
    "sparq": PreparedSparq,
    "pqcache": PreparedPqcache,
    "magicpig": PreparedMagicpig,
    "h2o": PreparedH2o,
}

_CHOOSE_THE_BEST: tuple[SelectorName, ...] = ("csattn", "exact")  # by logit, or nearly so


def register(name: str, factory: Callable[[ContextLayer], Prepared], about: About) -> None:
    """Make a selector of one's own known by that name in this process, to whatever decodes on the CPU.

    factory: called for each layer of a context, in the order of layers; see `csattn.selectors.base` for what it gives.
    Raises ConfigError for a name that is taken, or is no identifier.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"a selector's name must be an identifier, got {name!r}; use letters, digits and _")
    if name in (*ABOUT, *PRESET_NAMES, "all"):
        raise ConfigError(f"{name} is a selector or a preset already; choose another name")
    ABOUT[name], _FACTORIES[name] = about, factory


def prepare(name: SelectorName, layer: ContextLayer) -> Prepared:
    """What that selector makes of a layer of a context, with the options of its paper."""
    return _FACTORIES[name](layer)


def selector_for(name: str, view: ContextView) -> SelectorName:
    """The selector that does what was asked for: `full`, where everything is kept anyway.

    Raises ConfigError for a name that is not one.
    """
    selector = selector_named(name)
    return "full" if view.everything_kept and ABOUT[selector].keeps_top_k else selector


def resolve_rest(config: SearchConfig, name: SelectorName, layout: str, capped: bool = False) -> RestKind:
    """How attention to the rows that a selector leaves out is made up for: what was asked for, or what suits the index.

    layout: of the artifact's index; capped: the model's logits are, of which what tells of the rest does not know.
    Raises ConfigError for what does not go together; `full` leaves nothing out.
    """
    if name == "full" or config.rest == "none":
        return "none"
    if capped and config.rest is not None:
        raise ConfigError(
            f"rest {config.rest} estimates rows by uncapped logits, and this model caps its logits; leave rest out"
        )
    if config.rest is None:
        if capped:
            return "none"
        return "sketch" if (name, layout) == ("csattn", "sketch") else "none"
    if name not in _CHOOSE_THE_BEST:
        raise ConfigError(
            f"rest {config.rest} works only with the selectors {' and '.join(_CHOOSE_THE_BEST)}, and {name} works as "
            "it was published: choose one of those, or leave rest out"
        )
    if config.rest == "sketch" and layout != "sketch":
        raise ConfigError(
            f"rest sketch needs an index that is a sketch, and this context's has {layout}; build it with the preset "
            "default, or choose rest moments or none"
        )
    return config.rest
