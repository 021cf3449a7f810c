"""Centroid scoring: the index finds the rows."""

import numpy as np
from numpy.typing import NDArray

from csattn.index import LayerIndex
from csattn.search import SearchPool, empty_selection
from csattn.selection import Selection
from csattn.selectors.base import ContextView
from csattn.table.tail import make_tail


class CentroidSelector:
    """Searches a layer's index, and adds the rows of the tail that leave its window to the request's own part of it."""

    indexes_tail = True

    def __init__(self, index: LayerIndex, view: ContextView, pool: SearchPool):
        """pool: threads and scratch memory, shared by all layers and requests."""
        self._index = index
        self._view = view
        self._pool = pool
        self._tail = make_tail(index)

    def append(self, k: NDArray[np.float32]) -> None:
        self._tail.append(k)

    def select(self, q: NDArray[np.float32]) -> Selection:
        out = empty_selection(self._index.num_heads, self._view.top_k)
        self._pool.search(
            q,
            self._index,
            self._tail,
            self._view.top_k,
            self._view.config.sink_len,
            self._view.config.window_len,
            self._view.softmax_scale,
            out,
        )
        return out
