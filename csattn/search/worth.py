"""What each key is worth to a group of query rows, as an int32 that orders keys.

A query row's share of a key is its softmax weight, at least LEAST_SHARE (`reference.combine_group`). Shares are
computed as 2**HEADROOM times themselves: float32 then reaches from LEAST_SHARE, well above its smallest normal
number, to group_size * 2**HEADROOM. Positive floats order like their bits, so the bits of the sum are the worth.

With slope = softmax_scale * unit * log2(e), a share is 2 ** (slope * score - shift) / total, where total is the sum
of these powers over all scored keys, and shift an integer close to the largest slope * score: powers of two are
exact, so a larger shift may replace a smaller one while the sum is being built.

Scores come as int16 (rows) or float32 (lists); a float32 score of -0.0 marks a key that no list holds.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lanes import fma, lane_0, larger, largest_lane, sum_of_lanes, where_equal, where_less
from csattn.search.simd import F32x16, I16x16, I32x16, as_bits, convert, fill, lane_numbers, load, store

LANES = 16
NOT_SCORED = -(2**31)  # worth of what may not be chosen, and the bits of -0.0
HEADROOM = 94
LOG2_LEAST_SHARE = -216  # of reference.LEAST_SHARE
LOG2_E = 1.4426950408889634
ROUNDER = 1.5 * 2.0**23  # x + ROUNDER - ROUNDER rounds x to an integer, which the sum's low bits hold
KEYS_PER_SUM = 1 << 14  # shares summed in float32 before the sum moves to float64
NO_SHIFT = -1e300  # of a sum over no keys


@exact_kernel
def add_powers(
    scores: NDArray[Any], start: int, num_keys: int, slope: np.float32, shift: float, total: float
) -> tuple[float, float]:
    """shift and total with the scores [start, start + num_keys) added; begin with NO_SHIFT and 0."""
    top = largest_worth(scores, start, num_keys)
    if top == NOT_SCORED:
        return shift, total
    needed = np.rint(slope * from_worth(scores, top))
    if needed > shift:
        total = np.ldexp(total, int(max(shift - needed, -2000.0)))
        shift = needed
    for first in range(0, num_keys, KEYS_PER_SUM):
        total += sum_of_powers(scores, start + first, min(KEYS_PER_SUM, num_keys - first), slope, shift)
    return shift, total


@exact_kernel
def sum_of_powers(scores: NDArray[Any], start: int, num_keys: int, slope: np.float32, shift: float) -> np.float32:
    """Sum over the scored keys of 2 ** (slope * score - shift), in float32."""
    slopes, shifts = fill(F32x16, slope), fill(F32x16, -shift)
    floor, rounder, zero = fill(F32x16, -126), fill(F32x16, ROUNDER), fill(F32x16, 0)
    sums = zero
    whole = num_keys - num_keys % LANES
    for at in range(start, start + whole, LANES):
        power = exp2_lanes(fma(score_lanes(scores, at), slopes, shifts), floor, rounder)
        sums += scored_only(scores, at, power)
    if whole < num_keys:
        at = start + whole
        power = exp2_lanes(fma(score_lanes(scores, at), slopes, shifts), floor, rounder)
        power = scored_only(scores, at, power)
        sums += where_less(lane_numbers(I32x16), fill(I32x16, num_keys - whole), power, zero)
    total: np.float32 = sum_of_lanes(sums)
    return total


@exact_kernel
def combine_group(
    scores: NDArray[Any],  # [group_size * stride] int16 or float32: rows of num_keys scores, then anything
    stride: int,
    num_keys: int,
    slopes: NDArray[np.float32],  # [group_size]
    shifts: NDArray[np.float64],  # [group_size]
    totals: NDArray[np.float64],  # [group_size]
    worth: NDArray[np.int32],  # [num_keys rounded up to LANES], written
) -> None:
    """worth[i] = int32 that orders keys as the sum of the rows' shares does; NOT_SCORED where no row scores key i."""
    group_size = len(slopes)
    negative_shifts, floors = np.empty(group_size, np.float32), np.empty(group_size, np.float32)
    rounders, factors = np.empty(group_size, np.float32), np.empty(group_size, np.float32)
    for row in range(group_size):
        offset = np.floor(HEADROOM - np.log2(totals[row]))
        negative_shifts[row] = -shifts[row]
        floors[row] = LOG2_LEAST_SHARE + np.log2(totals[row])
        rounders[row] = ROUNDER + offset
        factors[row] = np.ldexp(1.0 / totals[row], HEADROOM - int(offset))
    zero, not_scored = fill(I32x16, 0), fill(I32x16, NOT_SCORED)
    for key in range(0, num_keys, LANES):
        share = fill(F32x16, 0)
        for row in range(group_size):
            at = row * stride + key
            power = fma(score_lanes(scores, at), fill(F32x16, slopes[row]), fill(F32x16, negative_shifts[row]))
            power = exp2_lanes(power, fill(F32x16, floors[row]), fill(F32x16, rounders[row]))
            share = fma(scored_only(scores, at, power), fill(F32x16, factors[row]), share)
        bits = as_bits(I32x16, share)
        store(worth, key, where_equal(bits, zero, not_scored, bits))


@exact_kernel
def largest_worth(scores: NDArray[Any], start: int, num_keys: int) -> int:
    """The largest of `scores_as_worth`, NOT_SCORED if no key is scored."""
    tops = fill(I32x16, NOT_SCORED)
    whole = num_keys - num_keys % LANES
    for key in range(0, whole, LANES):
        tops = larger(tops, scores_as_worth(scores, start + key))
    if whole < num_keys:
        rest = scores_as_worth(scores, start + whole)
        inside = fill(I32x16, num_keys - whole)
        tops = larger(tops, where_less(lane_numbers(I32x16), inside, rest, fill(I32x16, NOT_SCORED)))
    top: int = largest_lane(tops)
    return top


@exact_kernel
def worth_of_scores(scores: NDArray[Any], num_keys: int, worth: NDArray[np.int32]) -> None:
    """The worth of keys to a single query row: int32 in the order of the scores, NOT_SCORED where there is none."""
    for key in range(0, num_keys, LANES):
        store(worth, key, scores_as_worth(scores, key))


@exact_kernel
def exp2_lanes(x, floor, rounder):  # type: ignore[no-untyped-def]
    """2 ** (max(x, floor) + offset) in float32, where rounder is ROUNDER + offset, offset an integer.

    The result must be a normal float32. Its relative error is 4.1e-6 at most.
    """
    x = larger(x, floor)
    rounded = x + rounder
    fraction = x - (rounded - rounder)
    power = fma(fill(F32x16, 0.009570101276040077), fraction, fill(F32x16, 0.05591785907745361))
    power = fma(power, fraction, fill(F32x16, 0.240247443318367))
    power = fma(power, fraction, fill(F32x16, 0.6931217908859253))
    power = fma(power, fraction, fill(F32x16, 0.9999992847442627))
    exponent = as_bits(I32x16, rounded) << fill(I32x16, 23)
    return as_bits(F32x16, as_bits(I32x16, power) + exponent)


def score_lanes(scores: NDArray[Any], at: int) -> Any:
    """The scores from `at` on, as float32 lanes."""
    raise NotImplementedError("only kernels can call this")


@overload(score_lanes, strict=False)  # type: ignore[untyped-decorator]
def _score_lanes(scores: Any, at: Any) -> Any:
    if scores.dtype == types.int16:
        return lambda scores, at: convert(F32x16, convert(I32x16, load(I16x16, scores, at)))
    return lambda scores, at: load(F32x16, scores, at)


def scored_only(scores: NDArray[Any], at: int, value: Any) -> Any:
    """`value` in the lanes of scored keys from `at` on, 0.0 in the others."""
    raise NotImplementedError("only kernels can call this")


@overload(scored_only, strict=False)  # type: ignore[untyped-decorator]
def _scored_only(scores: Any, at: Any, value: Any) -> Any:
    if scores.dtype == types.int16:
        return lambda scores, at, value: value
    return lambda scores, at, value: where_equal(
        load(I32x16, scores, at), fill(I32x16, NOT_SCORED), fill(F32x16, 0), value
    )


def scores_as_worth(scores: NDArray[Any], at: int) -> Any:
    """int32 lanes in the order of the scores from `at` on, NOT_SCORED for keys that are not scored."""
    raise NotImplementedError("only kernels can call this")


@overload(scores_as_worth, strict=False)  # type: ignore[untyped-decorator]
def _scores_as_worth(scores: Any, at: Any) -> Any:
    if scores.dtype == types.int16:
        return lambda scores, at: convert(I32x16, load(I16x16, scores, at))

    def of_floats(scores: Any, at: Any) -> Any:
        bits = load(I32x16, scores, at)
        ordered = bits ^ ((bits >> fill(I32x16, 31)) & fill(I32x16, 0x7FFFFFFF))  # negative floats order backwards
        not_scored = fill(I32x16, NOT_SCORED)
        return where_equal(bits, not_scored, not_scored, ordered)

    return of_floats


def from_worth(scores: NDArray[Any], worth: int) -> Any:
    """The score that has this worth to a single query row."""
    raise NotImplementedError("only kernels can call this")


@overload(from_worth, strict=False)  # type: ignore[untyped-decorator]
def _from_worth(scores: Any, worth: Any) -> Any:
    if scores.dtype == types.int16:
        return lambda scores, worth: np.float64(worth)

    def float_of(scores: Any, worth: Any) -> Any:
        bits = fill(I32x16, worth)
        bits ^= (bits >> fill(I32x16, 31)) & fill(I32x16, 0x7FFFFFFF)
        return np.float64(lane_0(as_bits(F32x16, bits)))

    return float_of
