"""Prepare a layer of a context for the selector of a given name, csattn's own or a registered one."""

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

# all but `csattn`, whose index is in the artifact, and `window` and `full`, which do not choose
_FACTORIES: dict[str, Callable[[ContextLayer], Prepared]] = {
    "exact": PreparedExact,
    "quest": PreparedQuest,
    "sparq": PreparedSparq,
    "pqcache": PreparedPqcache,
    "magicpig": PreparedMagicpig,
    "h2o": PreparedH2o,
}

_CHOOSE_THE_BEST: tuple[SelectorName, ...] = ("csattn", "exact")  # choose rows by their logits, or nearly so


def register(name: str, factory: Callable[[ContextLayer], Prepared], about: About) -> None:
    """Register a user's selector under that name, for decoding on the CPU in this process.

    factory: called for each layer of a context, in order; see `csattn.selectors.base` for what it has to return.
    Raises ConfigError for a name that is taken or is no identifier, a factory that cannot be called, and an `about` of
    another type.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"a selector's name must be an identifier, got {name!r}; use letters, digits and _")
    if name in (*ABOUT, *PRESET_NAMES, "all"):
        raise ConfigError(f"{name} is a selector or a preset already; choose another name")
    if not callable(factory):
        raise ConfigError(f"a selector's factory is called with each layer, got {factory!r}; give its class")
    if not isinstance(about, About):
        raise ConfigError(f"a selector's description is an About, got {about!r}; give one")
    ABOUT[name], _FACTORIES[name] = about, factory


def prepare(name: SelectorName, layer: ContextLayer) -> Prepared:
    """Prepare a layer of a context for that selector, with the options of its paper."""
    return _FACTORIES[name](layer)


def selector_for(name: str, view: ContextView) -> SelectorName:
    """Return the selector to use: `full` instead of the named one, if it would keep every row anyway.

    Raises ConfigError for an unknown name.
    """
    selector = selector_named(name)
    return "full" if view.everything_kept and ABOUT[selector].keeps_top_k else selector


def resolve_rest(config: SearchConfig, name: SelectorName, layout: str, capped: bool = False) -> RestKind:
    """Return how a step attends to rows that are neither resident nor chosen: `config.rest`, or the index's default.

    layout: of the artifact's index; capped: the model caps its logits, which estimates of the rest cannot reproduce.
    The default is `sketch` for `csattn` over a sketch, otherwise `none`. `full` leaves no rows out, so it is `none`.
    Raises ConfigError for a combination that does not work.
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
