"""The shape of an existing index of any layout."""

from csattn.index import ListIndex
from csattn.search.device import IndexShape, ListsShape, SketchShape
from csattn.sketch import SketchIndex


def shape_of(index: ListIndex | SketchIndex, num_q_heads: int) -> IndexShape:
    """Return the shape of a layer's index, for queries of `num_q_heads` heads."""
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
