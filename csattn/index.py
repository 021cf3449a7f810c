"""The index of one layer by lists: codebooks to match queries with, and the table of their centroids' lists."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csattn.table.lists import ListTable

_LANES = 16


@dataclass(frozen=True)
class ListIndex:
    """The index of one layer by lists: what a search reads. Arrays may be read-only maps; all requests share them.

    An index by a sketch, the default, is a `csattn.sketch.SketchIndex`.
    """

    codebooks: NDArray[np.float32]  # [num_index_heads, num_subspaces, num_centroids, subspace_dim], unit rows
    key_mean: NDArray[np.float32]  # [num_index_heads, head_dim]; zero when keys are not centred
    table: ListTable
    weigh_by_norm: bool  # whether a subspace's weight is the query's norm in it, instead of 1
    # [num_q_heads, head_dim + 1, head_dim]: predicts head h's query in the next layer, before RoPE, as
    # [early, 1] @ next_query[h], where early is the next layer's query projection applied to this layer's input.
    # None if the next layer has no index.
    next_query: NDArray[np.float32] | None = None

    @property
    def num_heads(self) -> int:
        return int(self.codebooks.shape[0])

    @property
    def num_subspaces(self) -> int:
        return int(self.codebooks.shape[1])

    @property
    def num_centroids(self) -> int:
        return int(self.codebooks.shape[2])

    @property
    def context_len(self) -> int:
        return self.table.context_len

    @cached_property
    def codebook_columns(self) -> NDArray[np.float32]:
        """The codebooks transposed for the search on the CPU, with centroids innermost, padded with zeros.

        [num_index_heads, num_subspaces, subspace_dim, num_centroids rounded up to 16].
        """
        room = -(-self.num_centroids // _LANES) * _LANES
        columns = np.zeros((*self.codebooks.shape[:2], self.codebooks.shape[3], room), np.float32)
        columns[..., : self.num_centroids] = self.codebooks.swapaxes(2, 3)
        return columns


@dataclass(frozen=True)
class NoIndex:
    """The index of a layer that keeps only the last rows of a context: it is never searched."""

    next_query: NDArray[np.float32] | None = None  # as in `ListIndex`
