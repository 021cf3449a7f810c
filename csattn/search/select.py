"""Select the exact top_k of a job's keys: group score descending, then index ascending; written by ascending index.

A sample gives a guess: a threshold that a few more than top_k keys reach. These are copied out, range by range.
Bisection over the integers finds the exact threshold among the copies, which are then filtered. If too few keys reach
the guess, it is lowered and tried again: the guess decides the time, never the result.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import larger, largest_lane, mask_at_least, pack_lanes, population, store_first
from csattn.cpu.simd import LANES, I32x16, fill, load
from csattn.search.group_scores import NOT_SCORED
from csattn.search.plan import SAMPLE

SAMPLE_ROOM = 2 * SAMPLE + LANES  # group scores of sampled keys, in whole vectors


@exact_kernel
def first_rank(top_k: int, num_sampled: int, step: int) -> int:
    """Return the rank in the sample whose group score is probably a little below that of the top_k-th key."""
    expected = top_k / step
    rank: int = int(expected + 3.0 * np.sqrt(expected) + 4.0) if step > 1 else num_sampled
    return rank


@exact_kernel
def guess_threshold(sample: NDArray[np.int32], num_sampled: int, rank: int, lowest: int) -> int:
    """A group score that about `rank` sampled keys reach; if they are fewer, `lowest`, which all scored keys reach."""
    if rank >= num_sampled:
        return lowest
    guess: int = max(lowest, kth_largest(sample, num_sampled, rank, NOT_SCORED))
    return guess


@exact_kernel
def take_best(
    copied: NDArray[np.int32],  # [at least num_copied] indices, ascending
    copied_group_scores: NDArray[np.int32],  # their group scores
    num_copied: int,
    guess: int,  # a group score that all copied keys reach
    chosen: NDArray[np.int32],  # [top_k], written: ascending, -1 padded
) -> int:
    """Choose among the copied keys; return how many: top_k, or num_copied if that is less."""
    top_k = len(chosen)
    num_chosen = min(num_copied, top_k)
    if num_copied <= top_k:
        for i in range(num_chosen):
            chosen[i] = copied[i]
    elif top_k > 0:
        threshold = kth_largest(copied_group_scores, num_copied, top_k, guess)
        _take_above(copied, copied_group_scores, num_copied, threshold, chosen)
    for i in range(num_chosen, top_k):
        chosen[i] = -1
    return num_chosen


@exact_kernel
def _take_above(
    copied: NDArray[np.int32],
    copied_group_scores: NDArray[np.int32],
    num_copied: int,
    threshold: int,  # the top_k-th group score
    chosen: NDArray[np.int32],
) -> None:
    """Write the keys above the threshold, and the first of those equal to it."""
    top_k, limits = len(chosen), fill(I32x16, threshold)
    ties = top_k - count_at_least(copied_group_scores, num_copied, threshold + 1)  # how many keys equal to it still fit
    to = np.int64(0)
    for at in range(0, num_copied, LANES):
        group_scores = load(I32x16, copied_group_scores, at)
        lanes = (np.uint64(1) << np.uint64(min(LANES, num_copied - at))) - np.uint64(1)
        tied = mask_at_least(group_scores, limits) & mask_at_least(limits, group_scores) & lanes
        above = mask_at_least(group_scores, limits) & lanes ^ tied
        while population(tied) > ties:
            tied ^= _highest_bit(tied)
        ties -= population(tied)
        to += store_lanes(chosen, to, load(I32x16, copied, at), above | tied)


@exact_kernel
def _highest_bit(bits: np.uint64) -> np.uint64:
    """Return the highest of up to 16 bits, of which at least one is set."""
    highest = bits
    for shift in (1, 2, 4, 8):
        highest |= highest >> np.uint64(shift)
    return np.uint64(highest ^ (highest >> np.uint64(1)))


@exact_kernel
def store_lanes(to: NDArray[np.int32], start: int, value: Any, bits: np.uint64) -> int:
    """Write the lanes whose bits are set to elements start, start + 1, ...; return how many."""
    count: int = population(bits)
    store_first(to, start, pack_lanes(value, bits), count)
    return count


@exact_kernel
def kth_largest(values: NDArray[np.int32], num_values: int, k: int, low: int) -> int:
    """Return a number that the k largest of the values reach and, except for ties with the k-th, no others.

    Found by bisection: at least k of the values must reach `low`.
    """
    high: int = largest_of(values, num_values) + 1  # no value reaches it
    while high - low > 1:
        middle = (low + high) >> 1
        reach = count_at_least(values, num_values, middle)
        if reach == k:
            return middle
        if reach > k:
            low = middle
        else:
            high = middle
    return low


@exact_kernel
def largest_of(values: NDArray[np.int32], num_values: int) -> np.int64:
    """Return the largest of the values; -2**31 if there are none."""
    whole = num_values - num_values % LANES
    highs = fill(I32x16, -(2**31))
    for i in range(0, whole, LANES):
        highs = larger(highs, load(I32x16, values, i))
    largest = np.int64(largest_lane(highs))
    for i in range(whole, num_values):
        largest = max(largest, np.int64(values[i]))
    return largest


@exact_kernel
def count_at_least(values: NDArray[np.int32], num_values: int, threshold: int) -> int:
    """Return how many of the values reach the threshold, which may be 2**31."""
    if threshold > 2**31 - 1:
        return 0
    limit = fill(I32x16, threshold)
    whole = num_values - num_values % LANES
    count = 0
    for i in range(0, whole, LANES):
        count += population(mask_at_least(load(I32x16, values, i), limit))
    for i in range(whole, num_values):
        count += values[i] >= threshold
    return count
