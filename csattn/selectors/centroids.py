"""Search of the artifact's lists, to which a request's own rows are added: CSAttention (arXiv:2604.08584), as
published with the preset `paper`, corrected with `lists`. The sketch is not from that paper and is searched elsewhere.

Requests without own rows in the lists are searched for together, without a `Selector`, and so are all over a sketch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.index import ListIndex
from csattn.search import LayerSearch, SearchPool, empty_token_selections
from csattn.selection import Selection
from csattn.selectors.base import ContextView
from csattn.sketch import SketchIndex
from csattn.table.lists import list_bytes
from csattn.table.tail import ListTail


class CentroidSelector:
    """Searches a layer's lists, and tries to insert rows that leave the tail's window into the request's lists."""

    def __init__(self, index: ListIndex, pool: SearchPool, num_q_heads: int, view: ContextView):
        """pool: the threads and scratch memory of searches, shared by all layers and requests."""
        self._index, self._pool, self._view = index, pool, view
        self._tail = ListTail(index)
        self.search_bytes = search_bytes(index, num_q_heads)

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail.append(k)

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        view, config = self._view, self._view.config
        out = empty_token_selections(1, self._index.num_heads, view.top_k)
        resident = config.sink_len, config.window_len
        self._pool.search_layers([LayerSearch(q[None], self._index, self._tail, *resident, view.softmax_scale, out)])
        return out[0]


def index_bytes(index: ListIndex | SketchIndex) -> int:
    """Return the bytes of a layer's index, without the KV and without `predictor_bytes`."""
    if isinstance(index, SketchIndex):
        return index.num_bytes
    return _num_bytes(*index.table.arrays.values(), index.codebooks, index.key_mean)


def predictor_bytes(index: ListIndex | SketchIndex) -> int:
    """Return the bytes of the predictor of the next layer's queries, which only a search with lookahead = 1 reads."""
    return _num_bytes(index.next_query)


def search_bytes(index: ListIndex | SketchIndex, num_q_heads: int) -> int:
    """Return the bytes that the search for one token reads.

    Over a sketch, each code counts once for a group. Over lists, they are all centroids, and for each query head one
    list of every subspace.
    """
    if isinstance(index, SketchIndex):
        return _num_bytes(index.codes, index.key_mean, index.query_transform)
    of_list = list_bytes(index.table.list_len, index.context_len)
    return index.codebooks.nbytes + num_q_heads * index.num_subspaces * of_list


def _num_bytes(*arrays: NDArray[Any] | None) -> int:
    return sum(a.nbytes for a in arrays if a is not None)
