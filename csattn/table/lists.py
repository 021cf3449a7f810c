"""The table as Top-L lists: each centroid's L best keys, as (index, score) pairs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ENTRY_BYTES = 6  # of a list: a key's number and its score
LARGEST_SCORE = 65504.0  # what a float16 holds: scores beyond it are stored as that


@dataclass(frozen=True, slots=True)
class ListTable:
    """Lists are ordered by (score descending, index ascending). No stored score is -0.0 (see `search`)."""

    indices: NDArray[np.int32]  # [num_index_heads, num_subspaces, num_centroids, list_len]
    scores: NDArray[np.float16]  # same shape
    context_len: int

    @property
    def list_len(self) -> int:
        return int(self.indices.shape[-1])
