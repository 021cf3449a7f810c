"""The artifact's index finds the rows: by the codes of a sketch, or by centroids and lists.

The latter is CSAttention (arXiv:2604.08584) as published.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.index import LayerIndex
from csattn.search import SearchPool, empty_selection
from csattn.selection import Selection
from csattn.selectors.base import ContextView
from csattn.sketch import SketchIndex
from csattn.table.tail import ListTail


class PreparedSketch:
    """A layer's sketch, as it lies in the artifact."""

    def __init__(self, index: SketchIndex, pool: SearchPool):
        """pool: threads and scratch memory, shared by all layers and requests."""
        self.index, self.pool = index, pool

    @property
    def index_bytes(self) -> int:
        return self.index.num_bytes + _num_bytes(self.index.next_query)

    def selector(self, view: ContextView) -> "SketchSelector":
        return SketchSelector(self, view)


class SketchSelector:
    """Scores the codes of the context's rows. The tail has no codes: all of it stays resident."""

    indexes_tail = False

    def __init__(self, prepared: PreparedSketch, view: ContextView):
        self._prepared = prepared
        self._view = view

    @property
    def search_bytes(self) -> int:
        """A group's queries read each code once."""
        index = self._prepared.index
        return _num_bytes(index.codes, index.key_mean, index.query_transform)

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        raise AssertionError("the whole tail stays resident over a sketch")

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        return _search(self._prepared, None, self._view, q)


class PreparedCentroids:
    """A layer's centroids and lists, as they lie in the artifact."""

    def __init__(self, index: LayerIndex, pool: SearchPool, num_q_heads: int):
        """pool: threads and scratch memory, shared by all layers and requests."""
        self.index, self.pool, self.num_q_heads = index, pool, num_q_heads

    @property
    def index_bytes(self) -> int:
        index = self.index
        of_lists = _num_bytes(index.table.indices, index.table.scores)
        return of_lists + _num_bytes(index.codebooks, index.key_mean, index.next_query)

    def selector(self, view: ContextView) -> "CentroidSelector":
        return CentroidSelector(self, view)


class CentroidSelector:
    """Searches a layer's lists, and tries to insert the rows that leave the tail's window into the request's own."""

    indexes_tail = True

    def __init__(self, prepared: PreparedCentroids, view: ContextView):
        self._prepared = prepared
        self._view = view
        self._tail = ListTail(prepared.index)

    @property
    def search_bytes(self) -> int:
        """Each query matches its centroids and reads a list of each subspace."""
        index = self._prepared.index
        read = self._prepared.num_q_heads * index.num_subspaces * index.table.list_len * (4 + 2)
        return index.codebooks.nbytes + read

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail.append(k)

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        return _search(self._prepared, self._tail, self._view, q)


def _search(
    prepared: PreparedSketch | PreparedCentroids, tail: ListTail | None, view: ContextView, q: NDArray[np.float32]
) -> Selection:
    out, config = empty_selection(prepared.index.num_heads, view.top_k), view.config
    prepared.pool.search(
        q, prepared.index, tail, view.top_k, config.sink_len, config.window_len, view.softmax_scale, out
    )
    return out


def _num_bytes(*arrays: NDArray[Any] | None) -> int:
    return sum(a.nbytes for a in arrays if a is not None)
