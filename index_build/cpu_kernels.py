"""Scores of one subspace on the CPU. Definition: `reference.py`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel

_BLOCK = 1024  # keys whose float64 copies stay in the cache for all centroids


@exact_kernel
def score_keys(
    codebook: NDArray[np.float32],  # [num_centroids, subspace_dim]
    keys: NDArray[np.float32],  # [subspace_dim, context_len]
    scores: NDArray[np.float32],  # out: [num_centroids, context_len]
) -> None:
    """Every centroid's score of every key."""
    context_len = keys.shape[1]
    block = np.empty((keys.shape[0], _BLOCK), np.float64)
    sums, rounded = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.float32)
    for start in range(0, context_len, _BLOCK):
        _load_block(keys, start, block)
        num_keys = min(_BLOCK, context_len - start)
        for centroid in range(codebook.shape[0]):
            _score_block(codebook[centroid], block, sums, rounded)
            scores[centroid, start : start + num_keys] = rounded[:num_keys]


@exact_kernel
def _load_block(keys: Any, start: int, block: Any) -> None:
    """Keys from `start` on in float64, zeros after the last."""
    num_keys = min(_BLOCK, keys.shape[1] - start)
    for dim in range(keys.shape[0]):
        block[dim, :num_keys] = keys[dim, start : start + num_keys]
        block[dim, num_keys:] = 0.0


@exact_kernel
def _score_block(centroid: Any, block: Any, sums: Any, rounded: Any) -> None:
    sums[:] = 0.0
    for dim in range(block.shape[0]):
        weight = np.float64(centroid[dim])
        for i in range(_BLOCK):
            sums[i] += weight * block[dim, i]
    for i in range(_BLOCK):
        rounded[i] = np.float32(sums[i])
