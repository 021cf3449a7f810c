"""The shape that all indexes of a search have in common: kernels are compiled for it."""

from dataclasses import dataclass

from csattn.config import IndexConfig, SketchConfig, num_index_heads
from csattn.errors import ConfigError
from csattn.sketch.codes import num_coords

MAX_SUBSPACE_DIM = 32  # a centroid must fit into a thread's registers
MAX_GROUP_SIZE = 16  # a group's queries are the rows of one tensor-core product
WIDE_HEAD_DIM, MAX_WIDE_GROUP_SIZE = 256, 8  # a block has the projected queries in shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ListsShape:
    """The shape of lists."""

    num_index_heads: int
    group_size: int  # query heads that share an index head
    head_dim: int
    num_subspaces: int
    num_centroids: int
    weigh_by_norm: bool = True

    def __post_init__(self) -> None:
        if self.head_dim % self.num_subspaces:
            raise ConfigError(f"{self.num_subspaces} subspaces do not divide head_dim {self.head_dim}")
        if self.head_dim // self.num_subspaces > MAX_SUBSPACE_DIM:
            raise ConfigError(
                f"subspaces are {self.head_dim // self.num_subspaces} wide, the search on a GPU takes at most "
                f"{MAX_SUBSPACE_DIM}; rebuild the index with more subspaces, or decode on the CPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchShape:
    """The shape of sketches."""

    num_index_heads: int
    group_size: int
    head_dim: int
    num_fine: int  # words of 4-bit codes of a key
    num_coarse: int  # words of 2-bit codes

    def __post_init__(self) -> None:
        if self.group_size > MAX_GROUP_SIZE:
            raise ConfigError(
                f"{self.group_size} query heads share a KV head, the search on a GPU takes at most {MAX_GROUP_SIZE}; "
                "decode on the CPU"
            )
        if self.head_dim > WIDE_HEAD_DIM and self.group_size > MAX_WIDE_GROUP_SIZE:
            raise ConfigError(
                f"{self.group_size} query heads of {self.head_dim} dimensions share a KV head, the search on a GPU "
                f"takes at most {MAX_WIDE_GROUP_SIZE} that are wider than {WIDE_HEAD_DIM}: a thread block has no "
                "shared memory for more; decode on the CPU"
            )
        if self.head_dim % 8:
            raise ConfigError(f"head_dim is {self.head_dim}, the search on a GPU takes multiples of 8; use the CPU")

    @property
    def num_coords(self) -> int:
        return num_coords(self.num_fine, self.num_coarse)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsShape:
    """The shape of plain rows, which are searched without an index."""

    num_index_heads: int
    group_size: int
    head_dim: int


IndexShape = ListsShape | SketchShape


def index_shape(config: IndexConfig, num_q_heads: int, num_kv_heads: int, head_dim: int) -> IndexShape:
    """Return the shape of a layer's index that is built with this config."""
    heads = num_index_heads(config, num_q_heads, num_kv_heads)
    sizes = {"num_index_heads": heads, "group_size": num_q_heads // heads, "head_dim": head_dim}
    if isinstance(config, SketchConfig):
        num_fine, num_coarse = config.words(head_dim)
        return SketchShape(**sizes, num_fine=num_fine, num_coarse=num_coarse)
    return ListsShape(
        **sizes,
        num_subspaces=config.num_subspaces,
        num_centroids=config.num_centroids,
        weigh_by_norm=config.weigh_by_norm,
    )
