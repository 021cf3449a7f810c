"""What is measured: named indexes, and how a search in them goes about the rows that are not chosen."""

from dataclasses import replace

from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, preset
from csattn.models.spec import ModelSpec
from csattn.search.device import IndexShape, ListsShape, SketchShape
from csattn.selectors import resolve_rest


def _lists(name: str) -> ListConfig:
    """By torch's k-means, which runs where the benchmark does."""
    config = preset(name)
    assert isinstance(config, ListConfig)
    return replace(config, kmeans="torch")


INDEXES: dict[str, IndexConfig] = {
    "default": preset("default"),
    "lists": _lists("lists"),
    "paper": _lists("paper"),
}


def of_variant(variant: str, search: SearchConfig) -> tuple[IndexConfig, SearchConfig]:
    """`lists` is searched as suits lists, `lists+moments` with the rest by its moments, `default+none` without it."""
    name, _, rest = variant.partition("+")
    config = INDEXES[name]
    asked = replace(search, rest=rest or None)  # type: ignore[arg-type]  # which it checks
    return config, replace(asked, rest=resolve_rest(asked, "csattn", config.layout))


def num_index_heads(config: IndexConfig, shape: ModelSpec) -> int:
    shares = isinstance(config, SketchConfig) or config.share_group
    return shape.num_kv_heads if shares else shape.num_q_heads


def num_segments(config: IndexConfig, context_len: int) -> int:
    """Of a sketch."""
    return len(config.segment_starts(context_len)) if isinstance(config, SketchConfig) else 0


def index_shape(config: IndexConfig, shape: ModelSpec) -> IndexShape:
    """What the kernels of a search are compiled for."""
    heads = num_index_heads(config, shape)
    group_size = shape.num_q_heads // heads
    if isinstance(config, SketchConfig):
        num_fine, num_coarse = config.words(shape.head_dim)
        return SketchShape(
            num_index_heads=heads,
            group_size=group_size,
            head_dim=shape.head_dim,
            num_fine=num_fine,
            num_coarse=num_coarse,
        )
    return ListsShape(
        num_index_heads=heads,
        group_size=group_size,
        head_dim=shape.head_dim,
        num_subspaces=config.num_subspaces,
        num_centroids=config.num_centroids,
        weigh_by_norm=config.weigh_by_norm,
    )
