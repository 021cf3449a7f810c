"""The selectors there are: for the command line, the service and their documentation. Loads no heavy library."""

from dataclasses import dataclass
from typing import Literal, get_args

SelectorName = Literal["csattn", "exact", "full", "window"]
SELECTOR_NAMES: tuple[SelectorName, ...] = get_args(SelectorName)


@dataclass(frozen=True, slots=True)
class About:
    """What a selector is."""

    summary: str
    source: str  # where it was published; empty: nowhere
    keeps_top_k: bool  # it selects `keep` of the context, so keeping everything is full attention


ABOUT: dict[SelectorName, About] = {
    "csattn": About("centroid scores from the index", "CSAttention, arXiv:2604.08584", True),
    "exact": About("the true Top-K, by reading every key", "", True),
    "full": About("everything", "", False),
    "window": About("sinks and recent rows alone", "StreamingLLM, arXiv:2309.17453", False),
}


def described() -> str:
    """All names with what they are, as one sentence."""
    return "; ".join(f"{name}: {ABOUT[name].summary}" for name in SELECTOR_NAMES)
