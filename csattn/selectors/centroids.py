"""Centroid scoring: the index finds the rows (CSAttention, arXiv:2604.08584)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.index import LayerIndex
from csattn.search import SearchPool, empty_selection
from csattn.selection import Selection
from csattn.selectors.base import ContextView
from csattn.table.rows import RowTable
from csattn.table.tail import RowTail, make_tail


class PreparedCentroids:
    """A layer's index, as it lies in the artifact."""

    def __init__(self, index: LayerIndex, pool: SearchPool, num_q_heads: int):
        """pool: threads and scratch memory, shared by all layers and requests."""
        self.index, self.pool, self.num_q_heads = index, pool, num_q_heads

    @property
    def index_bytes(self) -> int:
        index, table = self.index, self.index.table
        arrays: list[NDArray[Any]] = [index.query_basis, index.codebooks, index.key_basis, index.key_mean]
        arrays += [table.codes, table.scales] if isinstance(table, RowTable) else [table.indices, table.scores]
        return sum(a.nbytes for a in arrays) + (0 if index.next_query is None else index.next_query.nbytes)

    def selector(self, view: ContextView) -> "CentroidSelector":
        return CentroidSelector(self, view)


class CentroidSelector:
    """Searches a layer's index, and adds the rows of the tail that leave its window to the request's own part of it."""

    indexes_tail = True

    def __init__(self, prepared: PreparedCentroids, view: ContextView):
        self._prepared = prepared
        self._view = view
        self._tail = make_tail(prepared.index)

    @property
    def search_bytes(self) -> int:
        """Each query matches its centroids and reads a row or list of each subspace."""
        index = self._prepared.index
        if isinstance(self._tail, RowTail):
            row_bytes: int = index.table.codes.shape[-1] + self._tail.num_rows  # type: ignore[union-attr]
        else:
            row_bytes = index.table.list_len * (4 + 2)  # type: ignore[union-attr]
        matched = index.query_basis.nbytes + index.codebooks.nbytes
        num_queries = index.num_heads if index.pool_group else self._prepared.num_q_heads
        return matched + num_queries * index.num_subspaces * row_bytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail.append(k)

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        out = empty_selection(self._prepared.index.num_heads, self._view.top_k)
        self._prepared.pool.search(
            q,
            self._prepared.index,
            self._tail,
            self._view.top_k,
            self._view.config.sink_len,
            self._view.config.window_len,
            self._view.softmax_scale,
            out,
        )
        return out
