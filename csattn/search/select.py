"""The top_k of an array, exactly: worth descending, then index ascending; written in ascending order of index.

A small sample guesses a threshold that a little more than top_k reach. Those are copied out, the exact threshold
is found among the copies by bisection over the integers, and the copies are filtered. A guess that too few reach
is lowered and tried again, so that the guess decides the time and never the result.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lanes import mask_at_least, population, trailing_zeros
from csattn.search.simd import I32x16, fill, load
from csattn.search.worth import LANES, NOT_SCORED

SAMPLE = 2048  # values looked at for the first guess


@exact_kernel
def select_top_k(
    worth: NDArray[np.int32],  # [at least num_keys rounded up to 64]; NOT_SCORED may not be chosen
    num_keys: int,
    copied: NDArray[np.int32],  # [as many] scratch: indices that reach the guess
    copied_worth: NDArray[np.int32],  # [as many] scratch: and their worth
    chosen: NDArray[np.int32],  # [top_k], written: ascending, -1 padded
) -> int:
    """The number of chosen indices: top_k, or all that are scored if they are fewer."""
    top_k = len(chosen)
    for i in range(num_keys, -(-num_keys // 64) * 64):
        worth[i] = NOT_SCORED
    num_copied = 0
    guess = NOT_SCORED + 1
    if top_k > 0:
        num_copied, guess = copy_enough(worth, num_keys, top_k, copied, copied_worth)
    num_chosen = min(num_copied, top_k)
    if num_copied <= top_k:
        chosen[:num_chosen] = copied[:num_chosen]
    else:
        threshold = kth_largest(copied_worth, num_copied, top_k, guess)
        above = count_at_least(copied_worth, num_copied, threshold + 1)
        ties = top_k - above  # how many of those at the threshold still fit: the first ones
        at = 0
        for i in range(num_copied):
            value = copied_worth[i]
            tie = value == threshold
            if at < top_k:
                chosen[at] = copied[i]
            at += value > threshold or (tie and ties > 0)
            ties -= tie
    chosen[num_chosen:] = -1
    return num_chosen


@exact_kernel
def copy_enough(
    worth: NDArray[np.int32], num_keys: int, top_k: int, copied: NDArray[np.int32], copied_worth: NDArray[np.int32]
) -> tuple[int, int]:
    """Copy out all indices whose worth reaches a guess; at least top_k of them, or all that are scored.

    Returns how many, and the guess.
    """
    lowest = NOT_SCORED + 1
    expected = top_k * SAMPLE / max(num_keys, 1)
    rank = int(expected + 3.0 * np.sqrt(expected) + 4.0) if num_keys > 2 * SAMPLE else SAMPLE
    while True:
        guess = lowest
        if rank < SAMPLE:
            sample = copied_worth[:SAMPLE]
            stride = num_keys // SAMPLE
            for i in range(SAMPLE):
                sample[i] = worth[np.uint64(i * stride + i % stride)]  # a walking phase: no period lines up with it
            guess = max(lowest, kth_largest(sample, SAMPLE, rank, NOT_SCORED))
        num_copied = copy_at_least(worth, num_keys, guess, copied, copied_worth)
        if num_copied >= top_k or guess == lowest:
            return num_copied, guess
        rank *= 2


@exact_kernel
def copy_at_least(
    worth: NDArray[np.int32], num_keys: int, guess: int, copied: NDArray[np.int32], copied_worth: NDArray[np.int32]
) -> int:
    """Copy out the indices whose worth reaches the guess, in their order, and their worth; return how many."""
    threshold = fill(I32x16, guess)
    num_copied = 0
    for block in range(0, num_keys, 64):
        bits = mask_at_least(load(I32x16, worth, block), threshold)
        for piece in range(1, 4):
            reach = mask_at_least(load(I32x16, worth, block + piece * LANES), threshold)
            bits |= reach << np.uint64(piece * LANES)
        while bits != np.uint64(0):
            key = np.uint64(block) + trailing_zeros(bits)
            copied[np.uint64(num_copied)] = key
            copied_worth[np.uint64(num_copied)] = worth[key]
            num_copied += 1
            bits &= bits - np.uint64(1)
    return num_copied


@exact_kernel
def kth_largest(values: NDArray[np.int32], num_values: int, k: int, low: int) -> int:
    """A number that the k largest of the values reach and, ties with the k-th aside, no others.

    By bisection: at least k of the values must reach `low`.
    """
    high = 2**31  # fewer than k reach it
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
