"""The measured variants: named indexes, and what a search does about the rows that are not chosen."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from bench.timing import gate
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


def require_known(variants: Sequence[str], others: Collection[str], search: SearchConfig) -> None:
    """Raise GateError or ConfigError unless each variant is one of `others` or what `of_variant` reads."""
    for variant in variants:
        if variant in others:
            continue
        known = f"variants are {', '.join([*others, *INDEXES])}, the last {len(INDEXES)} also with +moments or +none"
        gate(variant.partition("+")[0] in INDEXES, f"{known}; {variant!r} is none of them")
        of_variant(variant, search)


def num_segments(config: IndexConfig, context_len: int) -> int:
    """Return the number of segments of a sketch, 0 for lists."""
    return len(config.segment_starts(context_len)) if isinstance(config, SketchConfig) else 0
