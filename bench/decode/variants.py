"""The measured variants: named indexes, and what a search does about the rows that are not chosen."""

from dataclasses import replace

from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, preset
from csattn.selectors import resolve_rest


def lists_by_torch(name: str) -> ListConfig:
    """Return a preset of lists with torch's k-means, which runs on the benchmark's device."""
    config = preset(name)
    assert isinstance(config, ListConfig)
    return replace(config, kmeans="torch")


INDEXES: dict[str, IndexConfig] = {
    "default": preset("default"),
    "lists": lists_by_torch("lists"),
    "paper": lists_by_torch("paper"),
}


def of_variant(variant: str, search: SearchConfig) -> tuple[IndexConfig, SearchConfig]:
    """Return the index and search configurations of a variant.

    `lists` uses the `rest` that suits lists, `lists+moments` estimates the rest by moments, `default+none` drops it.
    """
    name, _, rest = variant.partition("+")
    config = INDEXES[name]
    asked = replace(search, rest=rest or None)  # type: ignore[arg-type]  # SearchConfig checks it
    return config, replace(asked, rest=resolve_rest(asked, "csattn", config.layout))


def num_segments(config: IndexConfig, context_len: int) -> int:
    """Return the number of segments of a sketch, 0 for lists."""
    return len(config.segment_starts(context_len)) if isinstance(config, SketchConfig) else 0
