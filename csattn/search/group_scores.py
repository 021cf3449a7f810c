"""The group score of each key over lists, as an int32 that orders keys.

A key's share in a query row is its softmax weight, at least LEAST_SHARE (`reference.combine_group`). Shares are scaled
by 2**HEADROOM, so that float32 holds LEAST_SHARE, well above its smallest normal number, and sums up to
group_size * 2**HEADROOM. Positive floats order like their bits, so the bits of the sum are the group score.

With slope = softmax_scale * log2(e), a share is 2 ** (slope * score) / total, where total is the sum of these
powers over all scored keys. Keys are cut into ranges, and each range has a shift: its powers are summed as
2 ** (slope * score - shift). Shifts are even integers, so that scaling by them is exact.

Scores are float32; -0.0 marks a key that no list holds.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger, largest_lane, sum_of_lanes, where_equal, where_less
from csattn.cpu.simd import LANES, F32x16, I32x16, as_bits, fill, lane_numbers, load

NOT_SCORED = -(2**31)  # group score of a key that may not be chosen; also the bits of -0.0
HEADROOM = 94
LOG2_LEAST_SHARE = -216  # of reference.LEAST_SHARE
ROUNDER = 1.5 * 2.0**23  # x + ROUNDER - ROUNDER rounds x to an integer, which the sum's low bits hold
KEYS_PER_SUM = 1 << 14  # powers summed in float32 before the sum moves to float64
NO_SHIFT = -1e300  # of a range without scored keys
LARGEST_SHIFT = 2.0**20  # of either sign: `exp2_lanes` takes about twice that
WIDEST = 100.0  # octaves below a range's largest power at which its powers are clamped


@exact_kernel
def sum_powers(scores: NDArray[np.float32], start: int, num_keys: int, slope: np.float32) -> tuple[float, float]:
    """Return the shift of keys [start, start + num_keys) and the sum of their powers; NO_SHIFT, 0 if none is scored."""
    largest = _largest_score(scores, start, num_keys)
    if largest == -np.inf:
        return NO_SHIFT, 0.0
    shift = float(2.0 * np.rint(slope * largest / 2.0))
    floor = np.float32((shift - WIDEST) / slope) if slope > 0.0 else np.float32(-np.inf)
    slopes, rounder, floors = fill(F32x16, slope), fill(F32x16, ROUNDER - shift), fill(F32x16, floor)
    total = 0.0
    for first in range(start, start + num_keys, KEYS_PER_SUM):
        last = min(first + KEYS_PER_SUM, start + num_keys)
        sums = fill(F32x16, 0)
        for at in range(first, last, LANES):
            power = scored_only(scores, at, exp2_lanes(larger(load(F32x16, scores, at), floors), slopes, rounder))
            if last - at < LANES:
                power = where_less(lane_numbers(I32x16), fill(I32x16, last - at), power, fill(F32x16, 0))
            sums += power
        total += sum_of_lanes(sums)
    return shift, total


@exact_kernel
def share_terms(slope: float, shift: float, total: float) -> tuple[float, float, float, float]:
    """Return the terms of `group_scores_of_shares` for a query row with this shift and sum over all keys.

    slope, floor, rounder, factor: a share is factor * 2 ** (slope * larger(score, floor) + offset), where rounder is
    ROUNDER + offset. The floor is the score whose share is LEAST_SHARE.
    """
    if not total > 0.0:
        return slope, -np.inf, ROUNDER, 0.0
    offset = 2.0 * np.floor((HEADROOM - np.log2(total)) / 2.0)
    lowest = LOG2_LEAST_SHARE + np.log2(total) + shift
    floor = lowest / slope if slope > 0.0 else -np.inf
    return slope, floor, ROUNDER + offset - shift, np.ldexp(1.0 / total, HEADROOM - int(offset))


@exact_kernel
def group_scores_of_shares(
    scores: NDArray[np.float32],  # [group_size * stride]
    stride: int,
    at: int,
    terms: NDArray[np.float32],  # [4 * group_size]: `share_terms` of each row
) -> Any:
    """Return the group scores of 16 keys from `at` on, as int32 lanes: the bits of 0.0 where no row scores a key."""
    share = fill(F32x16, 0)
    for row in range(len(terms) // 4):
        slopes, floors = fill(F32x16, terms[4 * row]), fill(F32x16, terms[4 * row + 1])
        rounder, factors = fill(F32x16, terms[4 * row + 2]), fill(F32x16, terms[4 * row + 3])
        power = exp2_lanes(larger(load(F32x16, scores, row * stride + at), floors), slopes, rounder)
        share = fma(scored_only(scores, row * stride + at, power), factors, share)
    return as_bits(I32x16, share)


@exact_kernel
def exp2_lanes(x, slopes, rounder):  # type: ignore[no-untyped-def]
    """Return 2 ** (slope * x + offset) in float32, where rounder is ROUNDER + offset, offset an even integer.

    The result must be a normal float32, |slope * x| below 2**21. The relative error is 4.1e-6 at most.
    """
    rounded = fma(x, slopes, rounder)
    fraction = fma(x, slopes, rounder - rounded)
    power = fma(fill(F32x16, 0.009570101276040077), fraction, fill(F32x16, 0.05591785907745361))
    power = fma(power, fraction, fill(F32x16, 0.240247443318367))
    power = fma(power, fraction, fill(F32x16, 0.6931217908859253))
    power = fma(power, fraction, fill(F32x16, 0.9999992847442627))
    exponent = as_bits(I32x16, rounded) << fill(I32x16, 23)
    return as_bits(F32x16, as_bits(I32x16, power) + exponent)


@exact_kernel
def scored_only(scores, at, value):  # type: ignore[no-untyped-def]
    """Return `value` in the lanes of scored keys from `at` on, 0.0 in the others."""
    return where_equal(load(I32x16, scores, at), fill(I32x16, NOT_SCORED), fill(F32x16, 0), value)


@exact_kernel
def as_group_scores(scores: NDArray[np.float32], at: int) -> Any:
    """Return int32 lanes that order like the scores from `at` on; NOT_SCORED for keys that are not scored."""
    bits, not_scored = load(I32x16, scores, at), fill(I32x16, NOT_SCORED)
    ordered = bits ^ ((bits >> fill(I32x16, 31)) & fill(I32x16, 0x7FFFFFFF))  # negative floats order backwards
    return where_equal(bits, not_scored, not_scored, ordered)


@exact_kernel
def _largest_score(scores: NDArray[np.float32], start: int, num_keys: int) -> Any:
    """Return the largest score of the scored keys in [start, start + num_keys); -inf if there are none."""
    end, none = start + num_keys, fill(F32x16, -np.inf)
    highs = none
    for at in range(start, end, LANES):
        score = where_equal(load(I32x16, scores, at), fill(I32x16, NOT_SCORED), none, load(F32x16, scores, at))
        if end - at < LANES:
            score = where_less(lane_numbers(I32x16), fill(I32x16, end - at), score, none)
        highs = larger(highs, score)
    return np.float64(largest_lane(highs))
