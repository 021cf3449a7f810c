"""The table as Top-L lists: each centroid's L best keys, as (index, score) pairs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ListTable:
    """Lists are ordered by (score descending, index ascending). No stored score is -0.0 (see `search`)."""

    indices: NDArray[np.int32]  # [num_index_heads, num_subspaces, num_centroids, list_len]
    scores: NDArray[np.float16]  # same shape
    context_len: int

    @property
    def list_len(self) -> int:
        return int(self.indices.shape[-1])

    def check(self) -> None:
        """Raise AssertionError if a list is unordered, repeats a key, or holds what a search must not meet."""
        indices, scores = np.asarray(self.indices), np.asarray(self.scores).astype(np.float32)
        assert indices.shape == scores.shape, f"indices {indices.shape} and scores {scores.shape} differ in shape"
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < self.context_len), "a key is out of range"
        assert np.isfinite(scores).all(), "a score is NaN or infinite"
        assert not (np.signbit(scores) & (scores == 0)).any(), "a score is -0.0"
        falls = scores[..., 1:] < scores[..., :-1]
        ties_in_order = (scores[..., 1:] == scores[..., :-1]) & (indices[..., 1:] > indices[..., :-1])
        assert (falls | ties_in_order).all(), "a list is not ordered by (score descending, index ascending)"
        by_key = np.sort(indices, axis=-1)
        assert (by_key[..., 1:] != by_key[..., :-1]).all(), "a list holds a key twice"
