"""The top_k of a job's keys, exactly: group score descending, then index ascending; written by ascending index.

A sample guesses a threshold that a little more than top_k keys reach. Those are copied out, range by range, the exact
threshold is found among the copies by bisection over the integers, and the copies are filtered. A guess that too few
reach is lowered and tried again, so that the guess decides the time and never the result.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import larger, largest_lane, mask_at_least, pack_lanes, population, store_first
from csattn.cpu.simd import LANES, I32x16, fill, load
from csattn.search.group_scores import NOT_SCORED
from csattn.search.plan import SAMPLE

SAMPLE_ROOM = 2 * SAMPLE + LANES  # for the group scores of sampled keys, in whole vectors


@exact_kernel
def first_rank(top_k: int, num_sampled: int, step: int) -> int:
    """The rank in the sample whose group score is guessed to be a little below that of the top_k-th key."""
    expected = top_k / step
    rank: int = int(expected + 3.0 * np.sqrt(expected) + 4.0) if step > 1 else num_sampled
    return rank


@exact_kernel
def guess_threshold(sample: NDArray[np.int32], num_sampled: int, rank: int, lowest: int) -> int:
    """A group score that about `rank` sampled keys reach; `lowest`, which all scored keys reach, beyond the sample."""
    if rank >= num_sampled:
        return lowest
    guess: int = max(lowest, kth_largest(sample, num_sampled, rank, NOT_SCORED))
    return guess


@exact_kernel
def take_best(
    copied: NDArray[np.int32],  # [at least num_copied] indices, ascending
    copied_group_scores: NDArray[np.int32],  # and their group scores
    num_copied: int,
    guess: int,  # that the copied keys reach
    chosen: NDArray[np.int32],  # [top_k], written: ascending, -1 padded
) -> int:
    """The number of chosen indices: top_k, or all that are copied if they are fewer."""
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
    threshold: int,  # group score of the last one that fits
    chosen: NDArray[np.int32],
) -> None:
    """All that are above the threshold and the first of those that are equal to it."""
    top_k, limits = len(chosen), fill(I32x16, threshold)
    ties = top_k - count_at_least(copied_group_scores, num_copied, threshold + 1)  # how many of those still fit
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
    """Of up to 16, of which there is one."""
    highest = bits
    for shift in (1, 2, 4, 8):
        highest |= highest >> np.uint64(shift)
    return np.uint64(highest ^ (highest >> np.uint64(1)))


@exact_kernel
def store_lanes(to: NDArray[np.int32], start: int, value: Any, bits: np.uint64) -> int:
    """Write the lanes whose bits are set to elements start, start + 1, ...; how many they are."""
    count: int = population(bits)
    store_first(to, start, pack_lanes(value, bits), count)
    return count


@exact_kernel
def kth_largest(values: NDArray[np.int32], num_values: int, k: int, low: int) -> int:
    """A number that the k largest of the values reach and, ties with the k-th aside, no others.

    By bisection: at least k of the values must reach `low`.
    """
    high: int = largest_of(values, num_values) + 1  # none reaches it
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
    """The largest of the values, or a number below all of them where there are none."""
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
    """How many of the values reach the threshold, which may be 2**31."""
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
