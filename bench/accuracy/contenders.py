"""What is compared: every selector, and our own with its presets, by name."""

from dataclasses import dataclass, replace

from bench.timing import gate
from csattn.config import PRESET_NAMES, SearchConfig
from csattn.selector_names import SELECTOR_NAMES

_AHEAD = "+ahead"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to choose rows. `preset` says which index the artifact has; only `csattn` searches it."""

    name: str
    selector: str
    preset: str = "default"
    lookahead: int = 0

    def search(self, keep: float) -> SearchConfig:
        return replace(SearchConfig(), keep=keep, lookahead=self.lookahead)


# Full attention is what all are compared with.
ALL = (
    "default",
    "default+ahead",
    "pooled",
    "paper",
    *(name for name in SELECTOR_NAMES if name not in ("csattn", "full")),
)


def find_contenders(names: str) -> list[Contender]:
    """A comma-separated list of selectors and presets, a preset perhaps with `+ahead`; `all` for all of them."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return [_find(name) for given in listed for name in (ALL if given == "all" else (given,))]


def shares(text: str) -> list[float]:
    """Comma-separated numbers, for argparse."""
    return [float(share) for share in text.split(",")]


def _find(name: str) -> Contender:
    preset, ahead, _ = name.partition(_AHEAD)
    preset = "default" if preset == "csattn" else preset
    if preset in PRESET_NAMES and name in (preset, preset + _AHEAD, "csattn", "csattn" + _AHEAD):
        return Contender(preset + ahead, "csattn", preset, int(bool(ahead)))
    gate(name in SELECTOR_NAMES, f"unknown selector {name!r}; choose from {', '.join(ALL)}, or all")
    return Contender(name, name)
