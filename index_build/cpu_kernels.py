"""Scores and codes of one subspace on the CPU. Definition: `reference.py`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.table.rows import KEYS_PER_BLOCK

_BLOCK = 16 * KEYS_PER_BLOCK  # keys whose float64 copies stay in the cache for all centroids
_HALF = KEYS_PER_BLOCK // 2
_MAGNITUDE = np.int32(0x7FFFFFFF)  # a float32 without its sign: its bits are ordered as it is
_ROUNDING = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves no fraction, and float32 rounds ties to even


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
def largest_scores(
    codebook: NDArray[np.float32],
    keys: NDArray[np.float32],
    largest: NDArray[np.float32],  # out: [num_centroids]
) -> None:
    """The largest magnitude among each centroid's scores."""
    block = np.empty((keys.shape[0], _BLOCK), np.float64)
    sums, rounded = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.float32)
    bits, found = rounded.view(np.int32), largest.view(np.int32)
    found[:] = 0
    for start in range(0, keys.shape[1], _BLOCK):
        _load_block(keys, start, block)
        for centroid in range(codebook.shape[0]):
            _score_block(codebook[centroid], block, sums, rounded)
            top = found[centroid]
            for i in range(_BLOCK):
                top = max(top, bits[i] & _MAGNITUDE)
            found[centroid] = top


@exact_kernel
def quantise_keys(
    codebook: NDArray[np.float32],
    keys: NDArray[np.float32],
    scales: NDArray[np.float32],  # [num_centroids]
    largest_code: int,
    rows: NDArray[np.uint8],  # out: [num_centroids, row_bytes], as `csattn.table.rows` lays them out
) -> None:
    """Every centroid's codes of all keys, packed: 4 bits with a largest code of 7, else 8."""
    block = np.empty((keys.shape[0], _BLOCK), np.float64)
    sums, rounded = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.float32)
    num_halves = 2 if largest_code == 7 else 1
    limit = np.float32(largest_code)
    for start in range(0, keys.shape[1], _BLOCK):
        _load_block(keys, start, block)
        first_byte = start // num_halves
        num_bytes = min(_BLOCK // num_halves, rows.shape[1] - first_byte)
        for centroid in range(codebook.shape[0]):
            _score_block(codebook[centroid], block, sums, rounded)
            step = scales[centroid] if scales[centroid] > 0 else np.float32(1.0)
            for i in range(_BLOCK):
                code = min(max(rounded[i] / step, -limit), limit)
                rounded[i] = (code + _ROUNDING) - _ROUNDING
            _store_codes(rounded, num_halves, rows[centroid, first_byte : first_byte + num_bytes])


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


@exact_kernel
def _store_codes(codes: Any, num_halves: int, row: Any) -> None:
    if num_halves == 1:
        for i in range(row.shape[0]):
            row[i] = np.uint8(np.int8(codes[i]))
        return
    for first in range(0, row.shape[0], _HALF):
        for i in range(_HALF):
            low, high = np.int32(codes[2 * first + i]), np.int32(codes[2 * first + _HALF + i])
            row[first + i] = np.uint8((low + 8) | ((high + 8) << 4))
