"""What all indexes of one search have in common; kernels are compiled for it."""

from dataclasses import dataclass

from csattn.errors import ConfigError
from csattn.index import LayerIndex
from csattn.sketch import SketchIndex
from csattn.sketch.codes import num_coords

MAX_SUBSPACE_DIM = 32  # a centroid lies in a thread's registers
MAX_GROUP_SIZE = 16  # the queries of a group are rows of one product


@dataclass(frozen=True, slots=True, kw_only=True)
class ListsShape:
    """Of lists."""

    num_index_heads: int
    group_size: int  # queries that one index head answers for
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
    """Of sketches."""

    num_index_heads: int
    group_size: int
    head_dim: int
    num_fine: int
    num_coarse: int

    def __post_init__(self) -> None:
        if self.group_size > MAX_GROUP_SIZE:
            raise ConfigError(
                f"{self.group_size} query heads share a KV head, the search on a GPU takes at most {MAX_GROUP_SIZE}; "
                "decode on the CPU"
            )
        if self.head_dim % 8:
            raise ConfigError(f"head_dim is {self.head_dim}, the search on a GPU takes multiples of 8; use the CPU")

    @property
    def num_coords(self) -> int:
        return num_coords(self.num_fine, self.num_coarse)


IndexShape = ListsShape | SketchShape


def index_shape(index: LayerIndex | SketchIndex, num_q_heads: int) -> IndexShape:
    """The shape of a layer's index."""
    group_size = num_q_heads // index.num_heads
    if isinstance(index, SketchIndex):
        return SketchShape(
            num_index_heads=index.num_heads,
            group_size=group_size,
            head_dim=index.head_dim,
            num_fine=index.num_fine,
            num_coarse=index.num_coarse,
        )
    return ListsShape(
        num_index_heads=index.num_heads,
        group_size=group_size,
        head_dim=int(index.key_mean.shape[1]),
        num_subspaces=index.num_subspaces,
        num_centroids=index.num_centroids,
        weigh_by_norm=index.weigh_by_norm,
    )
