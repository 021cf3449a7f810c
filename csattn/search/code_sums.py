"""Weights of coded keys, and the weighted sums of their codes. Weights are 16-bit integers, multiplied as two bytes.

The largest weight of a chunk of keys is 2**15. Weights are rounded by ordered dithering: adding a fixed pattern of
numbers in [0, 1) before rounding down is right on average, however small the weights are.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.byte_lanes import add_byte_dots, gather_byte, transpose_bytes
from csattn.cpu.jit import exact_kernel, inlined_kernel
from csattn.cpu.lanes import fma, larger, largest_lane, sum_of_lanes, where_equal
from csattn.cpu.simd import (
    LANES,
    TILE_LANES,
    F32x16,
    F32xTile,
    I32x16,
    I32xTile,
    U16x16,
    U16x32,
    as_bits,
    convert,
    fill,
    load,
    prefetch_early,
    store,
)
from csattn.search.sketch_group_scores import NOT_COUNTED
from csattn.sketch.codes import BLOCK_KEYS, FINE_BITS

CHUNK_KEYS = 512  # their weights stay in the L1 cache
WEIGHT_BITS = 15  # of the largest weight
WEIGHT_BYTES = 8  # of a key: both bytes of its weight, four times
FURTHEST = 40  # octaves below the largest weight at which weights are clamped: they round to nothing
AHEAD_BLOCKS = 32  # prefetch distance
MANTISSA_BITS = 23
_MANTISSA, _ONE = 2**MANTISSA_BITS - 1, 127 << MANTISSA_BITS  # bits of a float32; those of 1.0
# for x from 1 to 2, 2**(x - 1) is C0 + C1 x + C2 x**2 + C3 x**3, with a relative error of 7.5e-5 at most
C0, C1, C2, C3 = 0.45213589, 0.4777697, -0.0080044232, 0.078024112
_FINE_MASK = 0x0F0F0F0F
_DITHER = (((np.arange(BLOCK_KEYS) * 37) % BLOCK_KEYS + 0.5) / BLOCK_KEYS).astype(np.float32)


@exact_kernel
def compute_weights(
    scores: NDArray[np.uint16],  # from `at` on, as in `sketch_scores`, or NOT_COUNTED
    at: int,
    num_keys: int,  # a multiple of 64
    exponent: int,  # a weight is 2 ** (2**exponent * score)
    # [.., num_keys / 16, 2, 16, ..] from `to` on, written: of every four keys the lower bytes of their weights, four
    # times, then the upper bytes
    weights: NDArray[np.int32],
    to: int,
    codes: NDArray[np.uint32],
    word: int,  # where a word of the same keys begins: half of its cache lines are prefetched, AHEAD_BLOCKS before use
    block_words: int,  # from one block of keys to the next
) -> tuple[Any, Any]:
    """Return the largest score, and the sum of weights in units of 2**-15 of its own; NOT_COUNTED, 0: none counts."""
    highs = fill(U16x32, NOT_COUNTED)
    for i in range(at, at + num_keys, 2 * LANES):
        highs = larger(highs, load(U16x32, scores, i))
    top = np.int64(largest_lane(highs))
    zero, not_counted = fill(I32x16, 0), fill(I32x16, NOT_COUNTED)
    if top == NOT_COUNTED:
        for i in range(to, to + num_keys * WEIGHT_BYTES // 4, LANES):
            store(weights, i, zero)
        return top, np.int64(0)
    furthest = FURTHEST << -exponent if exponent <= 0 else max(FURTHEST >> exponent, 1)
    shift = min(MANTISSA_BITS + exponent, 30)  # from units of score to the bits of a float's exponent
    floors, shifts, sums = fill(I32x16, top - furthest), fill(I32x16, shift), zero
    of_zero = fill(I32x16, (WEIGHT_BITS << MANTISSA_BITS) - (top << shift))  # modulo 2**32, like the summand
    for i in range(0, num_keys, LANES):
        score = convert(I32x16, load(U16x16, scores, at + i))
        power = _power_of_two((larger(score, floors) << shifts) + of_zero)
        weight = convert(I32x16, power + load(F32x16, _DITHER, i % BLOCK_KEYS))
        weight = where_equal(score, not_counted, zero, weight)
        sums += weight
        store(weights, to + 2 * i, gather_byte(weight, 0))
        store(weights, to + 2 * i + LANES, gather_byte(weight, 1))
        if i % (2 * LANES) == 0:
            prefetch_early(codes, word + (i // BLOCK_KEYS + AHEAD_BLOCKS) * block_words + i % BLOCK_KEYS)
    return top, np.int64(sum_of_lanes(sums))


@inlined_kernel
def _power_of_two(x):  # type: ignore[no-untyped-def]
    """Return 2 ** (x / 2**MANTISSA_BITS) of integers x, with a relative error of 7.5e-5 at most."""
    bits = as_bits(F32x16, (x & fill(I32x16, _MANTISSA)) | fill(I32x16, _ONE))  # from 1.0 to 2.0
    power = fma(fill(F32x16, C3), bits, fill(F32x16, C2))
    power = fma(power, bits, fill(F32x16, C1))
    power = fma(power, bits, fill(F32x16, C0))
    return as_bits(F32x16, as_bits(I32x16, power) + (x & fill(I32x16, ~_MANTISSA)))


@exact_kernel
def add_code_sums(
    codes: NDArray[np.uint32],  # flat; whole blocks
    num_fine: int,  # words of a key whose codes are summed, the first of num_words
    num_words: int,
    first: int,  # of the blocks [first, last)
    last: int,
    weights: NDArray[np.int32],  # [group_size * row_weights]: see `compute_weights`
    row_weights: int,
    scales: NDArray[np.float32],  # [group_size]: factors of the rows' weights
    # [group_size * row_sums], added to: each row's begin with [num_fine, 2, 16], where lanes i, i + 4, ... of half h of
    # word w belong to coordinate 8 w + 4 h + i
    sums: NDArray[np.float32],
    row_sums: int,
) -> None:
    """Add the sums over keys of weight * code to `sums`."""
    group_size = len(scales)
    row = 0
    while row < group_size:
        for word in range(num_fine):
            place = first * num_words + word
            if group_size < 4:
                of_row = row * row_weights, row * row_sums + 2 * LANES * word
                _add_one(codes, place, num_words, last - first, weights, scales[row], sums, of_row)
            else:
                four = min(row, group_size - 4)
                to = four * row_sums + 2 * LANES * word
                of_rows = four, four * row_weights, row_weights, to, row_sums
                _add_four(codes, place, num_words, last - first, weights, scales, sums, of_rows, row - four)
        row = row + 1 if group_size < 4 else min(row, group_size - 4) + 4


@exact_kernel
def _add_one(
    codes: NDArray[np.uint32],
    place: int,
    num_words: int,
    num_blocks: int,
    weights: NDArray[np.int32],
    scale: np.float32,
    sums: NDArray[np.float32],
    of_row: tuple[int, int],
) -> None:
    zero, mask, step = fill(I32xTile, 0), fill(I32xTile, _FINE_MASK), fill(I32xTile, FINE_BITS)
    for lane in range(0, LANES, TILE_LANES):
        at, to = of_row[0] + lane, of_row[1] + lane
        row = zero, zero, zero, zero
        for block in range(num_blocks):
            begin = (place + block * num_words) * BLOCK_KEYS
            for i in range(begin, begin + BLOCK_KEYS, LANES):
                word = transpose_bytes(load(I32xTile, codes, i + lane))
                row = _add_word(row, word & mask, (word >> step) & mask, weights, at)
                at += 2 * LANES
        _add_to(sums, to, row, scale)


@exact_kernel
def _add_four(
    codes: NDArray[np.uint32],
    place: int,
    num_words: int,
    num_blocks: int,
    weights: NDArray[np.int32],
    scales: NDArray[np.float32],
    sums: NDArray[np.float32],
    of_rows: tuple[int, int, int, int, int],
    skip: int,  # how many of the four rows have been added before
) -> None:
    # LLVM makes worse code of a loop with one iteration
    if TILE_LANES == LANES:
        _add_four_in(0, codes, place, num_words, num_blocks, weights, scales, sums, of_rows, skip)
    else:
        for lane in range(0, LANES, TILE_LANES):
            _add_four_in(lane, codes, place, num_words, num_blocks, weights, scales, sums, of_rows, skip)


@inlined_kernel
def _add_four_in(lane, codes, place, num_words, num_blocks, weights, scales, sums, of_rows, skip):  # type: ignore[no-untyped-def]
    """Do the same in a tile's lanes, from `lane` on."""
    zero, mask, step = fill(I32xTile, 0), fill(I32xTile, _FINE_MASK), fill(I32xTile, FINE_BITS)
    row, first_weight, row_weights, first_sum, row_sums = of_rows
    at, to = first_weight + lane, first_sum + lane
    none = zero, zero, zero, zero
    a, b, c, d = none, none, none, none
    for block in range(num_blocks):
        begin = (place + block * num_words) * BLOCK_KEYS
        for i in range(begin, begin + BLOCK_KEYS, LANES):
            word = transpose_bytes(load(I32xTile, codes, i + lane))
            if lane == 0 and i % (2 * LANES) != 0:  # `compute_weights` has prefetched the others
                prefetch_early(codes, i + AHEAD_BLOCKS * num_words * BLOCK_KEYS)
            low, high = word & mask, (word >> step) & mask
            a = _add_word(a, low, high, weights, at)
            b = _add_word(b, low, high, weights, at + row_weights)
            c = _add_word(c, low, high, weights, at + 2 * row_weights)
            d = _add_word(d, low, high, weights, at + 3 * row_weights)
            at += 2 * LANES
    if skip < 1:
        _add_to(sums, to, a, scales[row])
    if skip < 2:
        _add_to(sums, to + row_sums, b, scales[row + 1])
    if skip < 3:
        _add_to(sums, to + 2 * row_sums, c, scales[row + 2])
    _add_to(sums, to + 3 * row_sums, d, scales[row + 3])


@inlined_kernel
def _add_word(sums, low, high, weights, at):  # type: ignore[no-untyped-def]
    """Add to one row's sums: lower nibbles times lower and times upper bytes, then upper nibbles times both."""
    lower, upper = load(I32xTile, weights, at), load(I32xTile, weights, at + LANES)
    return (
        add_byte_dots(sums[0], lower, low),
        add_byte_dots(sums[1], upper, low),
        add_byte_dots(sums[2], lower, high),
        add_byte_dots(sums[3], upper, high),
    )


@inlined_kernel
def _add_to(sums, to, row, scale):  # type: ignore[no-untyped-def]
    eight, scales = fill(I32xTile, 8), fill(F32xTile, scale)
    low = convert(F32xTile, row[0] + (row[1] << eight))
    high = convert(F32xTile, row[2] + (row[3] << eight))
    store(sums, to, fma(low, scales, load(F32xTile, sums, to)))
    store(sums, to + LANES, fma(high, scales, load(F32xTile, sums, to + LANES)))
