"""What is measured: named indexes, and how a search in them goes about the rows that are not chosen."""

from dataclasses import replace

from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, preset
from csattn.selectors import resolve_rest


def lists_by_torch(name: str) -> ListConfig:
    """That preset, of lists, by torch's k-means, which runs where the benchmark does."""
    config = preset(name)
    assert isinstance(config, ListConfig)
    return replace(config, kmeans="torch")


INDEXES: dict[str, IndexConfig] = {
    "default": preset("default"),
    "lists": lists_by_torch("lists"),
    "paper": lists_by_torch("paper"),
}


def of_variant(variant: str, search: SearchConfig) -> tuple[IndexConfig, SearchConfig]:
    """`lists` is searched as suits lists, `lists+moments` with the rest by its moments, `default+none` without it."""
    name, _, rest = variant.partition("+")
    config = INDEXES[name]
    asked = replace(search, rest=rest or None)  # type: ignore[arg-type]  # which it checks
    return config, replace(asked, rest=resolve_rest(asked, "csattn", config.layout))


def num_segments(config: IndexConfig, context_len: int) -> int:
    """Of a sketch."""
    return len(config.segment_starts(context_len)) if isinstance(config, SketchConfig) else 0
