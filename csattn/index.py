"""The index of one layer: how queries are split and matched, and the table their centroids look up."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csattn.table.lists import ListTable

_LANES = 16


@dataclass(frozen=True)
class LayerIndex:
    """Everything that a search in one layer reads. Arrays may be read-only memory maps, shared by all requests."""

    codebooks: NDArray[np.float32]  # [num_index_heads, num_subspaces, num_centroids, subspace_dim], unit rows
    key_mean: NDArray[np.float32]  # [num_index_heads, head_dim]; zero when keys are not centred
    table: ListTable
    weigh_by_norm: bool  # subspace weight: the query's norm in it, or 1
    # [num_q_heads, head_dim + 1, head_dim]: the next layer's query before RoPE is about [early, 1] @ next_query[h],
    # where early is what the next layer would project from this layer's input. None where that has no index.
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
        """The codebooks as a search on the CPU reads them: centroids side by side, zeros behind them to whole lanes.

        [num_index_heads, num_subspaces, subspace_dim, num_centroids rounded up to 16].
        """
        room = -(-self.num_centroids // _LANES) * _LANES
        columns = np.zeros((*self.codebooks.shape[:2], self.codebooks.shape[3], room), np.float32)
        columns[..., : self.num_centroids] = self.codebooks.swapaxes(2, 3)
        return columns


@dataclass(frozen=True)
class NoIndex:
    """Of a layer that keeps a context's last rows alone: nothing is searched."""

    next_query: NDArray[np.float32] | None = None  # as of `LayerIndex`: where the next layer has an index
