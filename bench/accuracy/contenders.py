"""What is compared: every selector, and our own with its presets, by name."""

from dataclasses import dataclass, replace

from bench.timing import gate
from csattn.config import PRESET_NAMES, SearchConfig
from csattn.selector_names import SELECTOR_NAMES

_AHEAD, _REST = "+ahead", "+rest"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to choose rows. `preset` says which index the artifact has; only `csattn` searches it."""

    name: str
    selector: str
    preset: str = "default"
    lookahead: int = 0
    estimate_rest: bool = False

    def search(self, keep: float) -> SearchConfig:
        return replace(SearchConfig(), keep=keep, lookahead=self.lookahead, estimate_rest=self.estimate_rest)


# Full attention is what all are compared with.
ALL = (
    "default",
    "default+ahead",
    "default+rest",
    "default+ahead+rest",
    "pooled",
    "pooled+rest",
    "exact+rest",
    "paper",
    *(name for name in SELECTOR_NAMES if name not in ("csattn", "full")),
)


def find_contenders(names: str) -> list[Contender]:
    """A comma-separated list of selectors and presets; `all` for all of them.

    A preset perhaps with `+ahead`, and then, as `exact`, with `+rest`: an estimate of the rows that are not read.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return [_find(name) for given in listed for name in (ALL if given == "all" else (given,))]


def shares(text: str) -> list[float]:
    """Comma-separated numbers, for argparse."""
    return [float(share) for share in text.split(",")]


def _find(given: str) -> Contender:
    name, rest, _ = given.partition(_REST)
    preset, ahead, _ = name.partition(_AHEAD)
    preset = "default" if preset == "csattn" else preset
    known = given in (name, name + _REST) and name in (preset, preset + _AHEAD, "csattn", "csattn" + _AHEAD)
    if preset in PRESET_NAMES and known:
        return Contender(preset + ahead + rest, "csattn", preset, int(bool(ahead)), bool(rest))
    if given == "exact" + _REST:
        return Contender(given, "exact", estimate_rest=True)
    gate(given in SELECTOR_NAMES, f"unknown selector {given!r}; choose from {', '.join(ALL)}, or all")
    return Contender(given, given)
