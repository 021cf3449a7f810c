"""Scores from dense rows: the weighted sum of one row of codes per subspace, in int16 lanes that may wrap around."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lanes import interleave, part
from csattn.search.simd import I8x32, I16x32, I16x64, U16x32, as_bits, convert, fill, load, prefetch, store

ROWS_AT_ONCE = 8  # more streams than this alias in the L1 cache when rows are a power of two long
CHUNK_BYTES = 4096  # of each row, before the next rows: the sums of a chunk of 4-bit codes fill 16 KiB
AHEAD_BYTES = 768  # prefetch distance: hardware does not follow that many streams by itself
STEP_BYTES = 64
SUM_BYTES = 4 * CHUNK_BYTES  # scratch memory of `add_rows4`


@exact_kernel
def add_rows8(
    codes: NDArray[np.uint8],  # flat; bytes are int8 codes
    starts: NDArray[np.int64],  # [num_rows] where each row begins in codes
    weights: NDArray[np.int64],  # [num_rows]
    num_bytes: int,  # of a row, a multiple of 64
    scores: NDArray[np.int16],  # num_bytes elements from `at` on are written
    at: int,
) -> None:
    """scores[at + i] = sum over rows of weight * code i."""
    for first in range(0, len(starts), ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, len(starts))
        for offset in range(0, num_bytes, STEP_BYTES):
            low, high = fill(I16x32, 0), fill(I16x32, 0)
            if first > 0:
                low, high = load(I16x32, scores, at + offset), load(I16x32, scores, at + offset + 32)
            for b in range(first, last):
                row = starts[b] + offset
                weight = fill(I16x32, weights[b])
                prefetch(codes, row + AHEAD_BYTES)
                low += convert(I16x32, load(I8x32, codes, row)) * weight
                high += convert(I16x32, load(I8x32, codes, row + 32)) * weight
            store(scores, at + offset, low)
            store(scores, at + offset + 32, high)


@exact_kernel
def add_rows4(
    codes: NDArray[np.uint8],  # flat, as in RowTable
    starts: NDArray[np.int64],  # [num_rows] where each row begins in codes
    weights: NDArray[np.int64],  # [num_rows]
    num_bytes: int,  # of a row to add, a multiple of 64
    scores: NDArray[np.int16],  # 2 * num_bytes elements from `at` on are written
    at: int,
    sums: NDArray[np.uint16],  # [SUM_BYTES // 2] scratch
) -> None:
    """scores[at + i] = sum over rows of weight * code of key i.

    A 16-bit lane holds four codes, n0 + 16 n1 + 256 n2 + 4096 n3. Instead of masking each out of every row, four
    sums take the whole lane shifted by 0, 4, 8 and 12 bits; what is too much in one is 16 times the next, modulo
    2**16. Codes are stored plus 8: that comes off at the end, too.
    """
    four, eight, twelve = fill(U16x32, 4), fill(U16x32, 8), fill(U16x32, 12)
    offset_sum = fill(U16x32, 8 * weights.sum())
    for chunk in range(0, num_bytes, CHUNK_BYTES):
        chunk_end = min(chunk + CHUNK_BYTES, num_bytes)
        for first in range(0, len(starts), ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, len(starts))
            for offset in range(chunk, chunk_end, STEP_BYTES):
                at_sum = 2 * (offset - chunk)
                s0, s1, s2, s3 = fill(U16x32, 0), fill(U16x32, 0), fill(U16x32, 0), fill(U16x32, 0)
                if first > 0:
                    s0, s1 = load(U16x32, sums, at_sum), load(U16x32, sums, at_sum + 32)
                    s2, s3 = load(U16x32, sums, at_sum + 64), load(U16x32, sums, at_sum + 96)
                for b in range(first, last):
                    row = starts[b] + offset
                    prefetch(codes, row + AHEAD_BYTES)
                    lanes = load(U16x32, codes, row)
                    weight = fill(U16x32, weights[b])
                    s0 += lanes * weight
                    s1 += (lanes >> four) * weight
                    s2 += (lanes >> eight) * weight
                    s3 += (lanes >> twelve) * weight
                if last < len(starts):
                    store(sums, at_sum, s0)
                    store(sums, at_sum + 32, s1)
                    store(sums, at_sum + 64, s2)
                    store(sums, at_sum + 96, s3)
                    continue
                s0 -= (s1 << four) + offset_sum
                s1 -= (s2 << four) + offset_sum
                s2 -= (s3 << four) + offset_sum
                s3 -= offset_sum
                low_halves = as_bits(I16x64, interleave(s0, s2))
                high_halves = as_bits(I16x64, interleave(s1, s3))
                key = at + 2 * offset  # the lane's two blocks of 64 keys, low halves before high halves
                store(scores, key, part(I16x32, low_halves, 0))
                store(scores, key + 32, part(I16x32, high_halves, 0))
                store(scores, key + 64, part(I16x32, low_halves, 1))
                store(scores, key + 96, part(I16x32, high_halves, 1))
