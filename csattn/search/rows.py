"""Scores from dense rows: the weighted sum of one row of codes per subspace, in int16 lanes that may wrap around."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lanes import add_dots, part, zip_fours, zip_high, zip_low
from csattn.search.simd import I8x32, I16x32, I32x16, U16x32, as_bits, convert, fill, load, prefetch, store

ROWS_AT_ONCE = 8  # of 8-bit codes: more streams than this alias in the L1 cache when rows are a power of two long
AHEAD_BYTES = 512  # prefetch distance: hardware does not follow that many streams by itself
STEP_BYTES = 64


@exact_kernel
def add_rows8(
    codes: NDArray[np.uint8],  # flat; bytes are int8 codes
    starts: NDArray[np.int64],  # [.., num_rows, ..] where each row begins in codes
    weights: NDArray[np.int64],  # likewise
    first_row: int,  # where those num_rows begin in starts and weights
    num_rows: int,
    offset: int,  # of the bytes to add in each row
    num_bytes: int,  # a multiple of 64
    scores: NDArray[np.int16],  # num_bytes elements from `at` on are written
    at: int,
) -> None:
    """scores[at + i] = sum over rows of weight * code i."""
    for first in range(first_row, first_row + num_rows, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, first_row + num_rows)
        for i in range(0, num_bytes, STEP_BYTES):
            low, high = fill(I16x32, 0), fill(I16x32, 0)
            if first > first_row:
                low, high = load(I16x32, scores, at + i), load(I16x32, scores, at + i + 32)
            for row in range(first, last):
                start = starts[row] + offset + i
                weight = fill(I16x32, weights[row])
                prefetch(codes, start + AHEAD_BYTES)
                low += convert(I16x32, load(I8x32, codes, start)) * weight
                high += convert(I16x32, load(I8x32, codes, start + 32)) * weight
            store(scores, at + i, low)
            store(scores, at + i + 32, high)


@exact_kernel
def add_rows4(
    codes: NDArray[np.uint8],  # flat, as in RowTable
    starts: NDArray[np.int64],  # [.., num_rows, ..] where each row begins in codes
    weights: NDArray[np.int64],  # likewise; of magnitude below 2**15
    first_row: int,  # where those num_rows begin in starts and weights
    num_rows: int,  # even
    offset: int,  # of the bytes to add in each row
    num_bytes: int,  # a multiple of 64
    scores: NDArray[np.int16],  # 2 * num_bytes elements from `at` on are written
    at: int,
    next_row: int,  # which num_rows rows, from which offset on, are wanted next: they are fetched in time
    next_offset: int,
) -> None:
    """scores[at + i] = sum over rows of weight * code of key i."""
    pairs = np.empty(num_rows // 2, np.int32)
    total = np.int64(0)
    for i in range(len(pairs)):
        low, high = weights[first_row + 2 * i], weights[first_row + 2 * i + 1]
        pairs[i] = (low & 0xFFFF) | (high << 16)
        total += low + high
    near = max(0, num_bytes - AHEAD_BYTES)
    begin, ahead = np.int64(0), offset + AHEAD_BYTES
    _add_steps(codes, starts, pairs, 8 * total, first_row, offset, begin, near, first_row, ahead, scores, at)
    ahead = next_offset - near
    _add_steps(codes, starts, pairs, 8 * total, first_row, offset, near, num_bytes, next_row, ahead, scores, at)


@exact_kernel
def _add_steps(
    codes: NDArray[np.uint8],
    starts: NDArray[np.int64],
    pairs: NDArray[np.int32],  # [num_rows / 2] two weights each
    offset_sum: int,  # what the codes' offset of 8 adds up to
    first_row: int,
    offset: int,
    begin: int,  # of the bytes [begin, end) behind the offset
    end: int,
    ahead_row: int,  # rows that are fetched meanwhile, from the offset on
    ahead_offset: int,
    scores: NDArray[np.int16],
    at: int,
) -> None:
    """Part of `add_rows4`.

    A 16-bit lane holds four codes, n0 + 16 n1 + 256 n2 + 4096 n3. Instead of masking each out of every row, four
    sums take the whole lane shifted by 0, 4, 8 and 12 bits; what is too much in one is 16 times the next, modulo
    2**16. Codes are stored plus 8; sums begin where the end of that arithmetic will have taken it off.
    """
    four, sixteen, mask = fill(I32x16, 4), fill(I32x16, 16), fill(I32x16, 0xFFFF)
    begin0, begin1 = fill(I32x16, -4369 * offset_sum), fill(I32x16, -273 * offset_sum)
    begin2, begin3 = fill(I32x16, -17 * offset_sum), fill(I32x16, -offset_sum)
    for i in range(begin, end, STEP_BYTES):
        sums = begin0, begin0, begin1, begin1, begin2, begin2, begin3, begin3
        for pair in range(len(pairs)):
            row, ahead = np.uint64(first_row + 2 * pair), np.uint64(ahead_row + 2 * pair)
            prefetch(codes, starts[ahead] + ahead_offset + i)
            prefetch(codes, starts[ahead + np.uint64(1)] + ahead_offset + i)
            a = load(U16x32, codes, starts[row] + offset + i)
            b = load(U16x32, codes, starts[row + np.uint64(1)] + offset + i)
            sums = _add_two(sums, a, b, as_bits(I16x32, fill(I32x16, pairs[np.uint64(pair)])))
        low3, high3 = sums[6], sums[7]
        low2, high2 = sums[4] - (low3 << four), sums[5] - (high3 << four)
        low1, high1 = sums[2] - (sums[4] << four), sums[3] - (sums[5] << four)
        low0, high0 = sums[0] - (sums[2] << four), sums[1] - (sums[3] << four)
        even = zip_fours((low0 & mask) | (low2 << sixteen), (high0 & mask) | (high2 << sixteen))
        odd = zip_fours((low1 & mask) | (low3 << sixteen), (high1 & mask) | (high3 << sixteen))
        key = at + 2 * i  # the lane's two blocks of 64 keys, low halves before high halves
        store(scores, key, part(I32x16, even, 0))
        store(scores, key + 32, part(I32x16, odd, 0))
        store(scores, key + 64, part(I32x16, even, 1))
        store(scores, key + 96, part(I32x16, odd, 1))


@exact_kernel
def _add_two(sums, a, b, weights):  # type: ignore[no-untyped-def]
    """The eight sums with two rows added: over four shifts, lanes of low and of high fours."""
    four, eight, twelve = fill(U16x32, 4), fill(U16x32, 8), fill(U16x32, 12)
    low, high = zip_low(a, b), zip_high(a, b)
    return (
        add_dots(sums[0], as_bits(I16x32, low), weights),
        add_dots(sums[1], as_bits(I16x32, high), weights),
        add_dots(sums[2], as_bits(I16x32, low >> four), weights),
        add_dots(sums[3], as_bits(I16x32, high >> four), weights),
        add_dots(sums[4], as_bits(I16x32, low >> eight), weights),
        add_dots(sums[5], as_bits(I16x32, high >> eight), weights),
        add_dots(sums[6], as_bits(I16x32, low >> twelve), weights),
        add_dots(sums[7], as_bits(I16x32, high >> twelve), weights),
    )
