"""The steps from the published method to `default`, one change at a time, that `bench.accuracy why` measures."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.accuracy.attending.attend import Reading
from bench.timing import gate
from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, preset

SHORT_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Way:
    """A way to choose rows: by an index or, if that is None, by exact scores."""

    name: str
    index: IndexConfig | None
    group: Literal["exact", "letter", "path"]  # path: all changes so far; letter: one change to the published method
    per_query_head: bool = False
    rest: Literal["none", "codes"] = "none"
    window_len: int = SearchConfig().window_len
    own_window: int | None = None  # how many of the tokens' last own rows are always read; None: all

    @property
    def codebooks(self) -> tuple[int, int, bool] | None:
        """What codebooks depend on: ways with the same value share them."""
        if not isinstance(self.index, ListConfig):
            return None
        return self.index.num_subspaces, self.index.num_centroids, self.index.share_group

    def reading(self, top_k: int) -> Reading:
        sink_len = SearchConfig().sink_len
        return Reading(top_k, sink_len, self.window_len, self.rest, self.own_window, self.per_query_head)


def ways() -> list[Way]:
    """Return all ways; those that share codebooks are neighbours, so the codebooks are made once."""
    letter, lists = preset("paper"), preset("lists")
    assert isinstance(letter, ListConfig) and isinstance(lists, ListConfig)

    def alone(name: str, index: ListConfig = letter, **more: Any) -> Way:
        return Way(name, index, "letter", per_query_head=not index.share_group, **more)

    def path(name: str, index: ListConfig) -> Way:
        return Way(name, index, "path", per_query_head=not index.share_group)

    return [
        Way("exact, per query head", None, "exact", per_query_head=True),
        Way("exact, per KV head", None, "exact"),
        path("paper", letter),
        path("+ keys centred", replace(letter, center_keys=True)),
        path("+ weighed by norm", replace(lists, share_group=False)),
        alone("weighed by norm", replace(letter, weigh_by_norm=True)),
        alone("L = 0.1 N", replace(letter, list_len=0.1)),
        alone("L = 0.4 N", replace(letter, list_len=0.4)),
        alone("L = N", replace(letter, list_len=1.0)),
        alone(f"a window of {SHORT_WINDOW}", window_len=SHORT_WINDOW),
        alone(f"a window of {SHORT_WINDOW}, own rows too", window_len=SHORT_WINDOW, own_window=SHORT_WINDOW),
        path("+ one choice per KV head (`lists`)", lists),
        path("+ L = N", replace(lists, list_len=1.0)),
        alone("one choice per KV head", replace(letter, share_group=True)),
        Way("a sketch chooses, not lists", SketchConfig(), "path"),
        Way("+ the rest by its codes (`default`)", SketchConfig(), "path", rest="codes"),
        alone("C = 64", replace(letter, num_centroids=64)),
        alone("m = 16", replace(letter, num_subspaces=16)),
        alone("C = 200", replace(letter, num_centroids=200)),
    ]


# the ways whose recall and mass are also measured as curves, over the share of rows kept
CURVES = ("exact, per query head", "paper", "+ one choice per KV head (`lists`)", "a sketch chooses, not lists")


def find_ways(names: str) -> list[Way]:
    """Parse names and groups separated by ';', or `all`."""
    every, listed = ways(), {name.strip() for name in names.split(";")}
    unknown = listed - {way.name for way in every} - {way.group for way in every} - {"all"}
    gate(not unknown, f"unknown way {', '.join(unknown)}; choose from {'; '.join(way.name for way in every)}")
    return [way for way in every if {way.name, way.group, "all"} & listed]
