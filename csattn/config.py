"""How an index is made and how it is searched: frozen values, checked once, where they enter."""

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from csattn.checks import require_at_least, require_one_of, require_share
from csattn.errors import ConfigError

Kmeans = Literal["faiss", "torch"]
RestKind = Literal["sketch", "moments", "none"]

# where no GPU places centroids; on macOS, FAISS and torch bring an OpenMP each, and two of them crash the process
KMEANS_ON_CPU: Kmeans = "torch" if sys.platform == "darwin" else "faiss"

SEGMENT_STEP = 1024  # segments of a sketch begin at multiples of this many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchConfig:
    """A sketch of every key: see `csattn.sketch`."""

    num_fine: int = 2  # words of 4-bit codes for each 64 dimensions of a key
    num_coarse: int = 2  # words of 2-bit codes, likewise: at 2 and 2, three quarters of the coordinates are kept
    segment_len: int = 8192  # rows that share a transform, about
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
        """Refuse heads that are too narrow, or so wide that codes would depend on the order of sums."""
        if not 8 <= head_dim <= 512:
            raise ConfigError(f"a sketch needs heads of 8 to 512 dimensions, got {head_dim}; use the preset lists")

    def words(self, head_dim: int) -> tuple[int, int]:
        """Fine and coarse words of a key: at least one, and no more than there are dimensions for."""
        self.require_head_dim(head_dim)
        num_fine = max(1, self.num_fine * head_dim // 64)
        return num_fine, min(self.num_coarse * head_dim // 64, (head_dim - 8 * num_fine) // 16)

    def segment_starts(self, context_len: int) -> list[int]:
        """Segments of about segment_len rows, all but the last whole multiples of SEGMENT_STEP."""
        num_segments = max(1, round(context_len / self.segment_len))
        return sorted({context_len * i // num_segments // SEGMENT_STEP * SEGMENT_STEP for i in range(num_segments)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListConfig:
    """Query centroids, and for each the keys that it scores highest: the published method and its refinements."""

    num_subspaces: int = 8  # m: slices of head_dim, all of one width
    num_centroids: int = 128  # C: per subspace
    list_len: float = 0.25  # L as a share of the context
    center_keys: bool = True  # subtract mean(k): softmax does not see it, ranking by parts does
    weigh_by_norm: bool = True  # weigh subspace b by the norm of the query in it, instead of by 1
    share_group: bool = True  # one codebook, table and selection per KV head instead of one per query head
    num_iterations: int = 10  # of k-means
    seed: int = 1234  # of k-means
    kmeans: Kmeans = KMEANS_ON_CPU  # which program places the centroids: they differ, so it is part of what an index is
    layout: Literal["lists"] = "lists"

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, ("lists",))
        require_one_of("kmeans", self.kmeans, get_args(Kmeans))
        require_at_least("num_subspaces", self.num_subspaces, 1)
        require_at_least("num_centroids", self.num_centroids, 1)
        require_at_least("num_iterations", self.num_iterations, 1)
        require_share("list_len", self.list_len)

    def require_head_dim(self, head_dim: int) -> None:
        """Refuse heads that cannot be split."""
        if head_dim % self.num_subspaces:
            raise ConfigError(
                f"head_dim={head_dim} cannot be split into {self.num_subspaces} equal subspaces; choose a divisor with "
                "--num-subspaces"
            )

    def list_entries(self, context_len: int) -> int:
        """L, the entries kept per centroid of a context of that length."""
        return max(1, round(self.list_len * context_len))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


IndexConfig = SketchConfig | ListConfig


def num_index_heads(config: IndexConfig, num_q_heads: int, num_kv_heads: int) -> int:
    """That choose rows, in a layer: KV heads, or query heads each for itself."""
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
    """How the context is searched, and what is read of it, at each step."""

    keep: float = 0.02  # share of the context fetched for each KV head, besides the resident rows
    sink_len: int = 4  # first rows of the context, always attended
    window_len: int = 256  # last rows of the context, and last rows of the tail, always attended
    lookahead: int = 0  # 1: search with the query predicted from the previous layer's input
    search_period: int = 1  # search at every N-th token of a request; those between read what it chose
    # how rows that are neither resident nor chosen are attended to: by their codes in the sketch, by an estimate from
    # the context's moments, or not at all; None: as suits the index, see `csattn.selectors.resolve_rest`
    rest: RestKind | None = None

    def __post_init__(self) -> None:
        require_share("keep", self.keep)
        require_at_least("sink_len", self.sink_len, 0)
        require_at_least("window_len", self.window_len, 1)
        require_at_least("search_period", self.search_period, 1)
        require_one_of("lookahead", self.lookahead, (0, 1))
        require_one_of("rest", self.rest, (*get_args(RestKind), None))

    def top_k(self, context_len: int) -> int:
        """K, the rows fetched per KV head from a context of that length."""
        return max(1, round(self.keep * context_len))


def preset(name: str) -> IndexConfig:
    """The named index configuration.

    `default` is the sketch; `lists` is what measures best among lists, `paper` the published method to the letter (see
    bench/log.md).
    """
    if name == "default":
        return SketchConfig()
    if name == "lists":
        return ListConfig()
    if name == "paper":
        return ListConfig(center_keys=False, weigh_by_norm=False, share_group=False)
    raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESET_NAMES)}")


PRESET_NAMES = ("default", "lists", "paper")
