"""Samples a token from a large vocabulary, without the GIL, in a few passes over the logits and without sorting.

The definition is in `draw_reference`. Weights are not negative, so their bits, as integers, are ordered like their
values: a radix select finds the least weight that is kept by the upper half of its bits, then by the lower half.
"""

from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import exp_lanes, sum_of
from csattn.cpu.jit import exact_kernel, inlined_kernel
from csattn.cpu.lanes import larger, largest_lane, mask_at_least, trailing_zeros, where_less
from csattn.cpu.simd import LANES, F32x16, I32x16, as_bits, fill, load, store

_BLOCK = 512  # weights whose sum is taken as a whole: the draw finds its block first, then its token in the block
_HALF = 15  # bits of a digit, of two: no weight, being at most 1, has other than the low 30 bits set
_NUM = 1 << _HALF
_ALL = 1 << 62
_LEAST = np.finfo(np.float32).tiny  # smaller weights become 0


class Scratch(local):
    """Working memory of a thread, reused: to allocate it costs more than to sample."""

    def __init__(self) -> None:
        self._weights, self._places = np.empty(0, np.float32), np.empty(0, np.int32)
        self._counts, self._masses = np.empty(_NUM, np.int64), np.empty(_NUM)

    def of(self, vocab_size: int) -> "tuple[NDArray[Any], ...]":
        """The last four arguments of `draw_kernel`."""
        num = -(-vocab_size // LANES) * LANES
        if len(self._weights) < num:
            self._weights, self._places = np.empty(num, np.float32), np.empty(num, np.int32)
        return self._weights[:num], self._counts, self._masses, self._places


@exact_kernel
def draw_kernel(
    logits: Any,  # [vocab_size] float32; -inf: forbidden. At least one is finite, and none is NaN or +inf
    greatest: Any,  # float32, of the logits
    temperature: Any,  # float32, above 0
    min_p: Any,  # float32
    top_k: int,
    top_p: float,
    at: float,  # in [0, 1): the uniform variate
    weights: Any,  # this and the following: from a `Scratch`
    counts: Any,
    masses: Any,
    places: Any,
) -> Any:
    num = len(logits)
    _weigh(logits, greatest, temperature, max(min_p, _LEAST), weights)
    if 0 < top_k < num:
        _drop(weights, _no_more_than_greatest(weights, top_k))
        _keep(weights, top_k, np.inf, counts, masses, places)
    if top_p < 1:
        total = _sum_of_blocks(weights)[-1]
        _drop(weights, np.float32((1 - top_p) * total / num))  # even their sum is within what is left out
        _keep(weights, _ALL, top_p * total, counts, masses, places)
    return _place(weights, at)


@exact_kernel
def weigh_all(logits: Any, greatest: Any) -> Any:
    """Return the sum of e ** (logit - greatest)."""
    num, last, total = len(logits), np.full(LANES, -np.inf, np.float32), 0.0
    last[: num % LANES] = logits[num - num % LANES :]
    for start in range(0, num, _BLOCK):
        of_block = fill(F32x16, 0.0)
        for i in range(start, min(num // LANES * LANES, start + _BLOCK), LANES):
            of_block = of_block + exp_lanes(load(F32x16, logits, i) - fill(F32x16, greatest))
        total += sum_of(of_block)
    return total + sum_of(exp_lanes(load(F32x16, last, 0) - fill(F32x16, greatest)))


@exact_kernel
def _weigh(logits: Any, greatest: Any, temperature: Any, least: Any, weights: Any) -> None:
    """Write weights e ** ((logit - greatest) / temperature); 0 for those below `least`, and for the padding."""
    num, last = len(logits), np.full(LANES, -np.inf, np.float32)
    whole = num // LANES * LANES
    for i in range(0, whole, LANES):
        store(weights, i, _weights_of(load(F32x16, logits, i), greatest, temperature, least))
    if whole < num:
        last[: num - whole] = logits[whole:]
        store(weights, whole, _weights_of(load(F32x16, last, 0), greatest, temperature, least))


@inlined_kernel
def _weights_of(logits: Any, greatest: Any, temperature: Any, least: Any) -> Any:
    return _at_least(least, exp_lanes((logits - fill(F32x16, greatest)) / fill(F32x16, temperature)))


@inlined_kernel
def _at_least(least: Any, weights: Any) -> Any:
    """The weights that are at least `least`; 0 in place of the others."""
    bits = as_bits(I32x16, weights)
    return as_bits(F32x16, where_less(bits, as_bits(I32x16, fill(F32x16, least)), fill(I32x16, 0), bits))


@exact_kernel
def _drop(weights: Any, least: Any) -> None:
    """Set weights below `least` to 0, so that few are left to be examined one by one."""
    for i in range(0, len(weights), LANES):
        store(weights, i, _at_least(least, load(F32x16, weights, i)))


@exact_kernel
def _no_more_than_greatest(weights: Any, most: Any) -> Any:
    """A lower bound of the `most`-th largest weight: the `most`-th largest of the blocks' maxima."""
    num = len(weights) // _BLOCK
    if most > num:
        return np.float32(0)
    greatest = np.empty(num, np.float32)
    for block in range(num):
        of_block = load(F32x16, weights, block * _BLOCK)
        for i in range(block * _BLOCK + LANES, (block + 1) * _BLOCK, LANES):
            of_block = larger(of_block, load(F32x16, weights, i))
        greatest[block] = largest_lane(of_block)
    return np.sort(greatest)[num - most]


@exact_kernel
def _keep(weights: Any, most: Any, mass: Any, counts: Any, masses: Any, places: Any) -> None:
    """Keep the `most` greatest weights, or the fewest of the greatest whose sum reaches `mass`, if these are fewer.

    Of equal ones the first are kept. All others are set to 0. A radix select in two passes, by histograms of counts
    and of masses.
    """
    bits, places = weights.view(np.int32), places[: _places_above_0(weights, places)]
    counts[:] = 0
    masses[:] = 0.0
    for i in places:
        counts[bits[i] >> _HALF] += 1
        masses[bits[i] >> _HALF] += weights[i]
    kept, kept_mass, upper = 0, 0.0, _NUM - 1
    while upper > 0 and kept + counts[upper] < most and kept_mass + masses[upper] < mass:
        kept, kept_mass, upper = kept + counts[upper], kept_mass + masses[upper], upper - 1
    counts[:] = 0
    for i in places:
        if bits[i] >> _HALF == upper:
            counts[bits[i] & (_NUM - 1)] += 1
    lower, missing, value = _NUM - 1, most, np.empty(1, np.float32)
    while True:
        value.view(np.int32)[0] = least = (upper << _HALF) | lower
        missing = most - kept
        if kept_mass + counts[lower] * value[0] >= mass:
            missing = min(missing, np.int64(np.ceil((mass - kept_mass) / value[0])))
        if missing <= counts[lower] or lower == 0:
            break
        kept, kept_mass, lower = kept + counts[lower], kept_mass + counts[lower] * value[0], lower - 1
    for i in places:
        if bits[i] == least and missing > 0:
            missing -= 1
        elif bits[i] <= least:
            weights[i] = 0.0


@exact_kernel
def _places_above_0(weights: Any, places: Any) -> Any:
    """Write the places of weights above 0 in ascending order; returns how many there are."""
    bits, num = weights.view(np.int32), 0
    for start in range(0, len(bits), LANES):
        left = mask_at_least(load(I32x16, bits, start), fill(I32x16, 1))
        while left != 0:
            places[num] = start + trailing_zeros(left)
            left &= left - np.uint64(1)
            num += 1
    return num


@exact_kernel
def _sum_of_blocks(weights: Any) -> Any:
    """The inclusive prefix sums of the blocks' weights, float64."""
    num = -(-len(weights) // _BLOCK)
    sums, total = np.empty(num), 0.0
    for block in range(num):
        of_block = fill(F32x16, 0.0)
        for i in range(block * _BLOCK, min(len(weights), (block + 1) * _BLOCK), LANES):
            of_block = of_block + load(F32x16, weights, i)
        total += sum_of(of_block)
        sums[block] = total
    return sums


@exact_kernel
def _place(weights: Any, at: float) -> Any:
    """The first place up to which the weights add up to more than `at` of their sum (inverse transform sampling)."""
    sums = _sum_of_blocks(weights)
    wanted = min(at * sums[-1], np.nextafter(sums[-1], 0.0))
    block = np.searchsorted(sums, wanted, side="right")
    total, place = sums[block - 1] if block > 0 else 0.0, -1
    for i in range(block * _BLOCK, min(len(weights), (block + 1) * _BLOCK)):
        if weights[i] > 0:
            total, place = total + weights[i], i
            if total > wanted:
                break
    return place  # the block's last one, if this order of summation falls short of the block's sum by a rounding error
