"""The group score of each coded key. `csattn.sketch.reference.group_scores` is the definition.

Kernels store scores with BIAS added, as uint16 above 0: unsigned comparison orders them, and 0 is below all of them.
All arithmetic is on integers, so that neither ranges nor their order matter.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel, inlined_kernel
from csattn.cpu.lanes import larger, largest_lane, largest_of_eights, less_or_zero, smaller, sum_of_lanes, where_less
from csattn.cpu.simd import LANES, I32x16, U16x16, U16x32, convert, fill, lane_numbers, load, store
from csattn.sketch.reference import LEAST_OCTAVE, LOG_BITS, NORMALISER_KEYS, TOTAL_BITS

BIAS = 2**15  # added to scores when stored
NOT_COUNTED = 0  # in place of a score
VECTORS_PER_SUM = 1 << 6  # their weights add up to less than 2**31 in each lane
_VECTOR_KEYS = LANES * NORMALISER_KEYS
NO_OCTAVE = LEAST_OCTAVE - 2 * TOTAL_BITS
LEAST_GROUP_SCORE = 1
MARKED = 2**16 - 1  # group score of a marked key, which no other key exceeds


@exact_kernel
def write_maxima_of_eights(
    scores: NDArray[np.uint16], at: int, num_keys: int, greatest: NDArray[np.uint16], to: int
) -> None:
    """Write, from `to` on, the greatest score of every NORMALISER_KEYS keys from `at` on.

    If the last keys are fewer, the scores after them are overwritten. Nothing is written past the last of `greatest`:
    it may be another thread's.
    """
    for i in range(at + num_keys, at - (-num_keys // NORMALISER_KEYS) * NORMALISER_KEYS):
        scores[i] = NOT_COUNTED
    whole = num_keys // _VECTOR_KEYS * _VECTOR_KEYS
    for i in range(0, whole, _VECTOR_KEYS):
        store(greatest, to + i // NORMALISER_KEYS, _maxima_of_eights(scores, at + i))
    if whole < num_keys:
        last = np.empty(LANES, np.uint16)
        store(last, 0, _maxima_of_eights(scores, at + whole))
        for i in range(-(-(num_keys - whole) // NORMALISER_KEYS)):
            greatest[to + whole // NORMALISER_KEYS + i] = last[i]


@inlined_kernel
def _maxima_of_eights(scores, at):  # type: ignore[no-untyped-def]
    a, b = load(U16x32, scores, at), load(U16x32, scores, at + 2 * LANES)
    c, d = load(U16x32, scores, at + 4 * LANES), load(U16x32, scores, at + 6 * LANES)
    return largest_of_eights(a, b, c, d)


@exact_kernel
def normaliser(greatest: NDArray[np.uint16], first: int, count: int, exponent: int) -> int:
    """Return `reference.normaliser` of the `count` values that `write_maxima_of_eights` wrote from `first` on."""
    highs = fill(I32x16, LEAST_OCTAVE)
    for at in range(first, first + count, LANES):
        highs = larger(highs, _octaves(greatest, at, first + count, exponent))
    top, total = np.int64(largest_lane(highs)), np.int64(0)
    tops, furthest = fill(I32x16, top), fill(I32x16, TOTAL_BITS + 1)
    for block in range(first, first + count, VECTORS_PER_SUM * LANES):
        sums = fill(I32x16, 0)
        for at in range(block, min(block + VECTORS_PER_SUM * LANES, first + count), LANES):
            below = smaller(tops - _octaves(greatest, at, first + count, exponent), furthest)
            sums += fill(I32x16, 1 << TOTAL_BITS) >> below
        total += _wide_sum(sums)
    whole = 0
    while total >> whole + 1 != 0:
        whole += 1
    log = (top + whole - TOTAL_BITS << LOG_BITS) + (total >> whole - LOG_BITS) - 2**LOG_BITS
    found: int = log >> LOG_BITS + exponent
    return found


@inlined_kernel
def _octaves(greatest, at, end, exponent):  # type: ignore[no-untyped-def]
    """Return 16 scores in whole octaves; from `end` on NO_OCTAVE, far below all others."""
    score = convert(I32x16, load(U16x16, greatest, at)) - fill(I32x16, BIAS)
    octaves = score >> fill(I32x16, max(-exponent, 0)) << fill(I32x16, max(exponent, 0))
    octaves = larger(octaves, fill(I32x16, LEAST_OCTAVE))
    return where_less(lane_numbers(I32x16), fill(I32x16, end - at), octaves, fill(I32x16, NO_OCTAVE))


@exact_kernel
def _wide_sum(sums):  # type: ignore[no-untyped-def]
    """Return the sum, in 64 bits, of int32 lanes that are not negative."""
    high, low = sums >> fill(I32x16, 16), sums & fill(I32x16, 0xFFFF)
    return (np.int64(sum_of_lanes(high)) << 16) + np.int64(sum_of_lanes(low))


@exact_kernel
def best_share(
    scores: NDArray[np.uint16],  # [group_size * stride]
    stride: int,
    at: int,
    shifts: NDArray[np.uint16],  # [group_size]: normalisers less the least of them
) -> Any:
    """Return the group scores of 32 keys from `at` on, in uint16 lanes, with BIAS added."""
    best = fill(U16x32, LEAST_GROUP_SCORE)
    for row in range(len(shifts)):
        best = larger(best, less_or_zero(load(U16x32, scores, row * stride + at), fill(U16x32, shifts[row])))
    return best
