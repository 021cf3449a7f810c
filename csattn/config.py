"""How an index is made and how it is searched: frozen values, checked once, where they enter."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

from csattn.errors import ConfigError

Layout = Literal["rows", "lists"]
Basis = Literal["plain", "rope_pairs", "key_whitened"]
Kmeans = Literal["faiss", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchConfig:
    """A sketch of every key: see `csattn.sketch`."""

    bits_per_dim: float = 2.0  # of a key, on average: coordinates have 4 bits each, and half of them are kept at 2
    values_share: float = 0.5  # of the kept coordinates: from how many values are told

    layout: Literal["sketch"] = "sketch"

    def __post_init__(self) -> None:
        _require_one_of("layout", self.layout, ("sketch",))
        if not 0.0 < self.bits_per_dim <= 4.0:
            raise ConfigError(f"bits_per_dim must lie in (0, 4], got {self.bits_per_dim}")
        _require_share("values_share", self.values_share)

    def num_coords(self, head_dim: int) -> int:
        """Coordinates kept of a key: whole words of eight."""
        return min(max(8, 8 * round(self.bits_per_dim * head_dim / 32)), head_dim // 8 * 8)

    def num_values(self, head_dim: int) -> int:
        """Coordinates that values are told from: whole words of eight."""
        return max(8, 8 * round(self.values_share * self.num_coords(head_dim) / 8))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """What `index_build` makes for one layer and head. `preset` gives the two named choices."""

    layout: Layout  # rows: every key's quantised score per centroid; lists: the Top-L (index, score) pairs
    num_subspaces: int  # m: slices of head_dim, all of one width
    num_centroids: int  # C: per subspace
    basis: Basis  # coordinates in which head_dim is split into subspaces
    center_keys: bool  # subtract mean(k): softmax does not see it, ranking by parts does
    weigh_by_norm: bool  # weigh subspace b by the norm of the query in it, instead of by 1
    share_group: bool  # one codebook, table and selection per KV head instead of one per query head
    pool_group: bool = False  # search with one query per KV head: the sum of its query heads' unit queries
    score_bits: int = 4  # rows only: 4 or 8
    list_len: float = 0.25  # lists only: L as a share of the context
    num_iterations: int = 10  # of k-means
    seed: int = 1234  # of k-means
    kmeans: Kmeans = "faiss"  # which program places the centroids: they differ, so it is part of what an index is

    def __post_init__(self) -> None:
        _require_one_of("layout", self.layout, ("rows", "lists"))
        _require_one_of("basis", self.basis, ("plain", "rope_pairs", "key_whitened"))
        _require_one_of("score_bits", self.score_bits, (4, 8))
        _require_one_of("kmeans", self.kmeans, ("faiss", "torch"))
        _require_at_least("num_subspaces", self.num_subspaces, 1)
        _require_at_least("num_centroids", self.num_centroids, 1)
        _require_at_least("num_iterations", self.num_iterations, 1)
        _require_share("list_len", self.list_len)
        if self.pool_group and not self.share_group:
            raise ConfigError("pool_group makes one query of those that share an index; set share_group too")

    def list_entries(self, context_len: int) -> int:
        """L, the entries kept per centroid of a context of that length."""
        return max(1, round(self.list_len * context_len))

    def to_json(self) -> dict[str, Any]:
        """All options; pool_group only where it is set, so that indexes that are older than it keep their ids."""
        return {name: value for name, value in asdict(self).items() if name != "pool_group" or value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown index options {sorted(unknown)}; this artifact needs a newer csattn")
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """What is read of the context at each step."""

    keep: float = 0.05  # share of the context fetched for each KV head, besides the resident rows
    sink_len: int = 4  # first rows of the context, always attended
    window_len: int = 256  # last rows of the context, and last rows of the tail, always attended
    lookahead: int = 0  # 1: search with the query predicted from the previous layer's input
    search_period: int = 1  # search every so many steps, reuse the selection in between
    estimate_rest: bool = False  # add an estimate of what attention to the rows that are not read would give

    def __post_init__(self) -> None:
        _require_share("keep", self.keep)
        _require_at_least("sink_len", self.sink_len, 0)
        _require_at_least("window_len", self.window_len, 1)
        _require_at_least("search_period", self.search_period, 1)
        _require_one_of("lookahead", self.lookahead, (0, 1))

    def top_k(self, context_len: int) -> int:
        """K, the rows fetched per KV head from a context of that length."""
        return max(1, round(self.keep * context_len))


def preset(name: str, head_dim: int) -> IndexConfig:
    """The named index configuration for heads of that width.

    `paper` is the published method to the letter; `default` is what measures best (see bench/README.md); `pooled` reads
    a fraction of the table, for a selection that is somewhat worse.
    """
    default = IndexConfig(
        layout="rows",
        num_subspaces=_default_subspaces(head_dim),
        num_centroids=32 * max(1, head_dim // 64),
        basis="key_whitened",
        center_keys=True,
        weigh_by_norm=True,
        share_group=True,
    )
    if name == "default":
        return default
    if name == "pooled":
        return replace(default, pool_group=True)
    lists = IndexConfig(
        layout="lists",
        num_subspaces=8,
        num_centroids=128,
        basis="plain",
        center_keys=True,
        weigh_by_norm=True,
        share_group=True,
    )
    if name == "lists":
        return lists
    if name == "paper":
        return replace(lists, center_keys=False, weigh_by_norm=False, share_group=False)
    raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESET_NAMES)}")


def _default_subspaces(head_dim: int) -> int:
    """Subspaces four wide, but never more than 16: each is one row that every query head reads at every step."""
    return max(m for m in range(1, 17) if head_dim % m == 0 and (4 * m <= head_dim or m == 1))


PRESET_NAMES = ("default", "pooled", "lists", "paper")


def _require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _require_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ConfigError(f"{name} must be at least {lowest}, got {value}")


def _require_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{name} must lie in (0, 1], got {value}")
