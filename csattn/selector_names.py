"""The names of all selectors, for the command line, the service and their documentation. Loads no heavy library.

`SelectorName` has those that are part of csattn; `ABOUT` also has those added by `csattn.selectors.register`.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from csattn.errors import ConfigError

SelectorName = Literal["csattn", "exact", "quest", "sparq", "pqcache", "magicpig", "h2o", "window", "full"]
SELECTOR_NAMES: tuple[SelectorName, ...] = get_args(SelectorName)


@dataclass(frozen=True, slots=True)
class About:
    """The description of a selector."""

    summary: str
    source: str  # where it was published; empty if nowhere
    keeps_top_k: bool  # it selects the share `keep` of the context, so keeping everything is full attention


ABOUT: dict[str, About] = {
    "csattn": About(
        "the artifact's index: a sketch, or centroids and lists",
        "the lists: CSAttention, arXiv:2604.08584; the sketch: nowhere else",
        True,
    ),
    "exact": About("the true top-k, by reading every key", "", True),
    "quest": About("bounds of pages of 16 keys", "Quest, arXiv:2406.10774", True),
    "sparq": About(
        "a quarter of the query's components, and the mean value for the rest", "SparQ, arXiv:2312.04985", True
    ),
    "pqcache": About("product-quantised keys", "PQCache, arXiv:2407.12820", True),
    "magicpig": About(
        "rows sampled by hashing, as many as it finds, with weights", "MagicPIG, arXiv:2410.16179", False
    ),
    "h2o": About("the rows that have received the most attention so far", "H2O, arXiv:2306.14048", True),
    "window": About("only sinks and recent rows", "StreamingLLM, arXiv:2309.17453", False),
    "full": About("all rows", "", False),
}


def selector_named(name: str) -> SelectorName:
    """Return the name as a SelectorName; raise ConfigError if no selector has it."""
    if name in ABOUT:
        return cast(SelectorName, name)
    raise ConfigError(f"unknown selector {name!r}; choose one of {', '.join(ABOUT)}")


def described() -> str:
    """Return all names and their summaries as one line of text."""
    return "; ".join(f"{name}: {ABOUT[name].summary}" for name in ABOUT)
