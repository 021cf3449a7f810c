"""The artifact's lists with a request's own rows in them: CSAttention (arXiv:2604.08584), with the preset `paper` as
published, with `lists` corrected. The sketch, which is not from there, is searched elsewhere.

Requests that have no rows in the lists yet are searched for together, without a `Selector`: so are all over a sketch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.index import LayerIndex
from csattn.search import LayerSearch, SearchPool, empty_token_selections
from csattn.selection import Selection
from csattn.selectors.base import ContextView
from csattn.sketch import SketchIndex
from csattn.table.lists import list_bytes
from csattn.table.tail import ListTail


class CentroidSelector:
    """Searches a layer's lists, and tries to insert the rows that leave the tail's window into the request's own."""

    def __init__(self, index: LayerIndex, pool: SearchPool, num_q_heads: int, view: ContextView):
        """pool: threads and scratch memory, shared by all layers and requests."""
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


def index_bytes(index: LayerIndex | SketchIndex) -> int:
    """Of a layer's index, beside the KV and without `predictor_bytes`."""
    if isinstance(index, SketchIndex):
        return index.num_bytes
    return _num_bytes(*index.table.arrays.values(), index.codebooks, index.key_mean)


def predictor_bytes(index: LayerIndex | SketchIndex) -> int:
    """Of what predicts the next layer's queries, which only choices a layer ahead hold and read."""
    return _num_bytes(index.next_query)


def search_bytes(index: LayerIndex | SketchIndex, num_q_heads: int) -> int:
    """What a search of one token reads: each code once for a group; or the centroids, and a list of each subspace."""
    if isinstance(index, SketchIndex):
        return _num_bytes(index.codes, index.key_mean, index.query_transform)
    of_list = list_bytes(index.table.list_len, index.context_len)
    return index.codebooks.nbytes + num_q_heads * index.num_subspaces * of_list


def _num_bytes(*arrays: NDArray[Any] | None) -> int:
    return sum(a.nbytes for a in arrays if a is not None)
