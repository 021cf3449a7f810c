"""Configuration of the index and of its search: frozen values, checked once, where they enter."""

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from csattn.checks import require_at_least, require_one_of, require_share
from csattn.errors import ConfigError

Kmeans = Literal["faiss", "torch"]
RestKind = Literal["sketch", "moments", "none"]

# k-means without a GPU. On macOS, FAISS and torch each load their own OpenMP, and two of them crash the process
KMEANS_ON_CPU: Kmeans = "torch" if sys.platform == "darwin" else "faiss"

SEGMENT_STEP = 1024  # segments of a sketch begin at multiples of this many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchConfig:
    """A sketch of every key: see `csattn.sketch`."""

    num_fine: int = 2  # 32-bit words of 4-bit codes for each 64 dimensions of a key
    num_coarse: int = 2  # words of 2-bit codes for each 64 dimensions: 2 and 2 keep three quarters of the coordinates
    segment_len: int = 8192  # approximate number of rows that share a transform
    layout: Literal["sketch"] = "sketch"

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, ("sketch",))
        require_at_least("num_fine", self.num_fine, 1)
        require_at_least("num_coarse", self.num_coarse, 0)
        require_at_least("segment_len", self.segment_len, SEGMENT_STEP)
        if 8 * self.num_fine + 16 * self.num_coarse > 64:
            raise ConfigError(
                f"{self.num_fine} fine and {self.num_coarse} coarse words hold more than 64 coordinates; use fewer"
            )

    def require_head_dim(self, head_dim: int) -> None:
        """Raise ConfigError for heads that are too narrow, or so wide that codes would depend on the order of sums."""
        if not 8 <= head_dim <= 512:
            raise ConfigError(f"a sketch needs heads of 8 to 512 dimensions, got {head_dim}; use the preset lists")

    def words(self, head_dim: int) -> tuple[int, int]:
        """Return how many fine and coarse words a key takes: at least one fine, and no more than head_dim fills."""
        self.require_head_dim(head_dim)
        num_fine = max(1, self.num_fine * head_dim // 64)
        return num_fine, min(self.num_coarse * head_dim // 64, (head_dim - 8 * num_fine) // 16)

    def segment_starts(self, context_len: int) -> list[int]:
        """Return where segments of about segment_len rows begin: at multiples of SEGMENT_STEP."""
        num_segments = max(1, round(context_len / self.segment_len))
        return sorted({context_len * i // num_segments // SEGMENT_STEP * SEGMENT_STEP for i in range(num_segments)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListConfig:
    """Lists of the keys that each query centroid scores highest: the published method and its refinements."""

    num_subspaces: int = 8  # m: slices of head_dim, all of one width
    num_centroids: int = 128  # C: per subspace
    list_len: float = 0.25  # L as a share of the context
    center_keys: bool = True  # subtract mean(k): it does not change the softmax, but it changes rankings by subspace
    weigh_by_norm: bool = True  # weight each subspace by the norm of the query in it, instead of by 1
    share_group: bool = True  # one codebook, table and selection per KV head instead of one per query head
    num_iterations: int = 10  # of k-means
    seed: int = 1234  # of k-means
    kmeans: Kmeans = KMEANS_ON_CPU  # the k-means implementation: results differ, so it is part of the configuration
    layout: Literal["lists"] = "lists"

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, ("lists",))
        require_one_of("kmeans", self.kmeans, get_args(Kmeans))
        require_at_least("num_subspaces", self.num_subspaces, 1)
        require_at_least("num_centroids", self.num_centroids, 1)
        require_at_least("num_iterations", self.num_iterations, 1)
        require_share("list_len", self.list_len)

    def require_head_dim(self, head_dim: int) -> None:
        """Raise ConfigError for heads that cannot be split into equal subspaces."""
        if head_dim % self.num_subspaces:
            raise ConfigError(
                f"head_dim={head_dim} cannot be split into {self.num_subspaces} equal subspaces; choose a divisor with "
                "--num-subspaces"
            )

    def list_entries(self, context_len: int) -> int:
        """Return L, the number of entries that each centroid's list has in a context of that length."""
        return max(1, round(self.list_len * context_len))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


IndexConfig = SketchConfig | ListConfig


def num_index_heads(config: IndexConfig, num_q_heads: int, num_kv_heads: int) -> int:
    """Return how many heads of a layer choose rows: KV heads, or query heads if a group does not share."""
    own = isinstance(config, ListConfig) and not config.share_group
    return num_q_heads if own else num_kv_heads


def index_config_from_json(data: dict[str, Any]) -> IndexConfig:
    """The inverse of `to_json`."""
    kinds: dict[str, type[IndexConfig]] = {"sketch": SketchConfig, "lists": ListConfig}
    kind = kinds.get(data["layout"])
    if kind is None:
        raise ConfigError(f"unknown index layout {data['layout']!r}; this artifact needs another csattn")
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise ConfigError(f"unknown index options {sorted(unknown)}; this artifact needs a newer csattn")
    return kind(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Which rows of a context each step reads."""

    keep: float = 0.02  # share of the context fetched for each KV head, besides the resident rows
    sink_len: int = 4  # first rows of the context, always attended
    window_len: int = 256  # last rows of the context, and last rows of the tail, always attended
    lookahead: int = 0  # 1: search with the query predicted from the previous layer's input
    search_period: int = 1  # search at every N-th token of a request; the tokens between reuse its choice
    # how rows that are neither resident nor chosen are attended to: by their codes in the sketch, by an estimate from
    # the context's moments, or not at all; None: the index's default, see `csattn.selectors.resolve_rest`
    rest: RestKind | None = None

    def __post_init__(self) -> None:
        require_share("keep", self.keep)
        require_at_least("sink_len", self.sink_len, 0)
        require_at_least("window_len", self.window_len, 1)
        require_at_least("search_period", self.search_period, 1)
        require_one_of("lookahead", self.lookahead, (0, 1))
        require_one_of("rest", self.rest, (*get_args(RestKind), None))

    def top_k(self, context_len: int) -> int:
        """Return K, the number of rows fetched per KV head from a context of that length."""
        return max(1, round(self.keep * context_len))


_PRESETS: dict[str, IndexConfig] = {
    "default": SketchConfig(),
    "lists": ListConfig(),
    "paper": ListConfig(center_keys=False, weigh_by_norm=False, share_group=False),
}
PRESET_NAMES = tuple(_PRESETS)


def preset(name: str) -> IndexConfig:
    """Return the index configuration of that name; raise ConfigError for an unknown one.

    `default` is the sketch, `lists` the best of the lists by measurement, `paper` the published method to the letter
    (see bench/log.md).
    """
    if name not in PRESET_NAMES:
        raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESET_NAMES)}")
    return _PRESETS[name]
