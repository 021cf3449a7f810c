"""Scores from Top-L lists: reduce by key, by adding every entry's score to its key's place."""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES, F32x16, I32x16, U16x16, as_bits, convert, fill, load, prefetch, store

KEYS_PER_STEP = 256  # scores converted at a time: their float32 values stay in the L1 cache
AHEAD = 1024  # prefetch distance in entries: the scattered additions leave hardware prefetching no room


@exact_kernel
def clear_scores(scores: NDArray[np.float32], start: int, num_keys: int) -> None:
    """Mark keys as in no list: -0.0.

    x + -0.0 is x, so the mark costs the sum nothing; a sum is -0.0 only if everything added to -0.0 was -0.0, and
    `add_list` adds no -0.0. So a key's bits are still those of -0.0 if and only if no list holds it.
    """
    mark = fill(F32x16, -0.0)
    for key in range(start, start + num_keys, LANES):
        store(scores, key, mark)


@exact_kernel
def add_list(
    scores: NDArray[np.float32],  # [.., num_keys, ..]: the keys' sums begin at `start`
    start: int,
    indices: NDArray[np.int32],  # flat; one list begins at `first`
    halves: NDArray[np.uint16],  # flat, float16 bits
    first: int,
    length: int,
    weight: float,
    step: NDArray[np.float32],  # [KEYS_PER_STEP] scratch
) -> None:
    """scores[key] += weight * score for every entry, each operation rounded to float32."""
    weights = fill(F32x16, weight)
    whole = length - length % KEYS_PER_STEP
    base = np.uint64(start)
    for offset in range(first, first + whole, KEYS_PER_STEP):
        for i in range(0, KEYS_PER_STEP, LANES):
            prefetch(indices, offset + i + AHEAD)
            prefetch(halves, offset + i + AHEAD)
            store(step, i, weighted(load(U16x16, halves, offset + i), weights))
        for i in range(KEYS_PER_STEP):
            scores[base + np.uint64(indices[np.uint64(offset + i)])] += step[np.uint64(i)]
    for i in range(length - whole):
        half = halves[first + whole + i]
        store(step, 0, weighted(fill(U16x16, half), weights))
        scores[base + np.uint64(indices[first + whole + i])] += step[0]


@exact_kernel
def weighted(halves, weights):  # type: ignore[no-untyped-def]
    """weight * score of float16 bits, never -0.0.

    By integer arithmetic: the float16's exponent and mantissa, moved to where float32 has its own, read 2**-112
    times the value. That holds for subnormal numbers too, and the multiplication is exact.
    """
    bits = convert(I32x16, halves)
    magnitude = as_bits(F32x16, (bits & fill(I32x16, 0x7FFF)) << fill(I32x16, 13)) * fill(F32x16, 2.0**112)
    sign = (bits & fill(I32x16, 0x8000)) << fill(I32x16, 16)
    score = as_bits(F32x16, as_bits(I32x16, magnitude) | sign)
    return weights * score + fill(F32x16, 0.0)
