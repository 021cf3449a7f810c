"""Reduce by key by sorting: the way that lost against the accumulator of `csattn.search.lists` (see README.md)."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel

DIGIT_BITS = 10
NUM_DIGITS = 1 << DIGIT_BITS


@exact_kernel
def reduce_by_sort(
    keys: NDArray[np.int32],  # [n], below 2**20
    values: NDArray[np.float32],  # [n]
    spare_keys: NDArray[np.int32],  # [n] scratch
    spare_values: NDArray[np.float32],  # [n] scratch
) -> int:
    """Radix sort by key in two passes, then sum runs of equal keys; the sums are left at the front of both arrays."""
    n = len(keys)
    for digit in range(2):
        shift = digit * DIGIT_BITS
        starts = np.zeros(NUM_DIGITS + 1, np.int64)
        for i in range(n):
            starts[((keys[i] >> shift) & (NUM_DIGITS - 1)) + 1] += 1
        for d in range(NUM_DIGITS):
            starts[d + 1] += starts[d]
        for i in range(n):
            d = (keys[i] >> shift) & (NUM_DIGITS - 1)
            at = starts[d]
            starts[d] = at + 1
            spare_keys[at] = keys[i]
            spare_values[at] = values[i]
        keys, spare_keys = spare_keys, keys
        values, spare_values = spare_values, values
    num_sums = 0
    for i in range(n):
        if num_sums > 0 and keys[num_sums - 1] == keys[i]:
            values[num_sums - 1] += values[i]
        else:
            keys[num_sums] = keys[i]
            values[num_sums] = values[i]
            num_sums += 1
    return num_sums
