"""The methods that are compared, by name: every selector, and csattn with each of its presets."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import cast, get_args

from bench.timing import gate
from csattn.config import PRESET_NAMES, RestKind, SearchConfig
from csattn.errors import ConfigError
from csattn.selector_names import ABOUT, SELECTOR_NAMES

_AHEAD, _REST = "+ahead", "+rest="


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to choose rows. `preset` names the artifact's index, which only the selector `csattn` searches."""

    name: str
    selector: str
    preset: str = "default"
    lookahead: int = 0
    rest: RestKind | None = None

    def search(self, keep: float) -> SearchConfig:
        return SearchConfig(keep=keep, lookahead=self.lookahead, rest=self.rest)


# `full` is left out: it is the baseline.
ALL = (
    "default",
    "default+ahead",
    "default+rest=moments",
    "default+rest=none",
    "lists",
    "lists+rest=moments",
    "paper",
    "exact+rest=sketch",
    "exact+rest=moments",
    *(name for name in SELECTOR_NAMES if name not in ("csattn", "full")),
)


def find_contenders(names: str) -> list[Contender]:
    """Parse a comma-separated list of selectors and presets; `all` stands for all of them.

    A preset may be followed by `+ahead`. A preset or `exact` may end with `+rest=...`, which says how rows that are not
    read are attended to.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return [_find(name) for given in listed for name in (ALL if given == "all" else (given,))]


def shares(text: str) -> list[float]:
    """Parse comma-separated shares of rows, for argparse."""
    try:
        return [SearchConfig(keep=float(share)).keep for share in text.split(",")]
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error


def _find(given: str) -> Contender:
    chosen, _, rest = given.partition(_REST)
    name = chosen.removesuffix(_AHEAD)
    preset = "default" if name == "csattn" else name
    is_preset, is_known_rest = preset in PRESET_NAMES, rest in get_args(RestKind) and given.count(_REST) == 1
    if is_preset and (chosen == given or is_known_rest) and (rest != "sketch" or preset == "default"):
        own_rest = cast(RestKind | None, rest or None)
        return Contender(preset + given.removeprefix(name), "csattn", preset, int(chosen != name), own_rest)
    if chosen == "exact" and is_known_rest:
        return Contender(given, "exact", rest=cast(RestKind, rest))
    gate(given in ABOUT, f"unknown selector {given!r}; choose from {', '.join(ALL)}, or all")
    return Contender(given, given)
