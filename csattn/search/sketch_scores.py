"""Scores of coded keys, sums of codes times 8-bit multipliers: a code that is read serves four query heads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel, inlined_kernel
from csattn.search.atomics import array_at
from csattn.search.byte_lanes import add_byte_dots, narrow
from csattn.search.simd import I32x16, fill, load, prefetch_early, store
from csattn.search.sketch import query_places, rows_of_segment
from csattn.sketch.codes import BLOCK_KEYS, COARSE_BITS, FINE_BITS

LANES = 16
AHEAD_WORDS = 16384  # prefetch distance: 64 KiB; hardware stops at every page
STEP_KEYS = 1024  # whose codes stay in the caches while all of the group's rows are scored
FINE_MASK, COARSE_MASK = 0x0F0F0F0F, 0x03030303  # of four neighbouring codes in a word


@exact_kernel
def score_range(
    sketch: Any,
    head: int,
    queries: int,  # address of the group's queries, weighed: see `csattn.search.sketch`
    group_size: int,
    first: int,  # of the keys [first, last): a multiple of 64
    last: int,
    scores: NDArray[np.int16],  # row g's from g * stride + at on are written, up to 63 more than there are keys
    stride: int,
    at: int,
) -> None:
    """Scores of some keys, for all query rows of a group."""
    num_coords, num_segments = sketch.num_coords, sketch.num_segments
    _, _, _, at_offsets, at_multipliers = query_places(sketch, group_size)
    starts = array_at(sketch.segment_starts, num_segments, np.int32(0))
    of_head = sketch.num_blocks * (sketch.num_fine + sketch.num_coarse) * BLOCK_KEYS
    codes = array_at(sketch.codes + 4 * head * of_head, of_head, np.uint32(0))
    offsets = array_at(queries + at_offsets, group_size * num_segments, np.int32(0))
    multipliers = array_at(queries + at_multipliers, group_size * num_segments * num_coords // 4, np.int32(0))
    row_multipliers = num_segments * num_coords // 4
    for segment in range(num_segments):
        begin, end = rows_of_segment(starts, segment, first, last)
        for key in range(begin, end, STEP_KEYS):
            score_blocks(
                codes,
                sketch.num_fine,
                sketch.num_coarse,
                key // BLOCK_KEYS,
                -(-min(key + STEP_KEYS, end) // BLOCK_KEYS),
                multipliers[segment * num_coords // 4 :],
                row_multipliers,
                offsets[segment:],
                num_segments,
                group_size,
                scores,
                stride,
                at + key - first,
            )


@exact_kernel
def score_blocks(
    codes: NDArray[np.uint32],  # flat; whole blocks
    num_fine: int,  # words of a key
    num_coarse: int,
    first: int,  # of the blocks [first, last)
    last: int,
    multipliers: NDArray[np.int32],  # a query row's begin every row_multipliers: four of 8 bits in each
    row_multipliers: int,
    offsets: NDArray[np.int32],  # a query row's is every row_offsets
    row_offsets: int,
    group_size: int,
    scores: NDArray[np.int16],  # row g's from g * stride + at on are written: 64 for each block
    stride: int,
    at: int,
) -> None:
    """scores = 2 * the sum over coordinates of multiplier * code + offset."""
    size = num_fine, num_coarse
    row = 0
    while row < group_size:
        if group_size < 4:
            place = row * row_multipliers
            _score_one(
                codes, size, first, last, multipliers, place, offsets[row * row_offsets], scores, row * stride + at
            )
            row += 1
        else:
            four = min(row, group_size - 4)  # of a group that is no multiple of four some are scored twice
            of_rows = four * row_multipliers, row_multipliers, four * row_offsets, row_offsets
            _score_four(codes, size, first, last, multipliers, offsets, of_rows, scores, four * stride + at, stride)
            row = four + 4


@exact_kernel
def _score_one(
    codes: NDArray[np.uint32],
    size: tuple[int, int],
    first: int,
    last: int,
    multipliers: NDArray[np.int32],
    place: int,
    offset: int,
    scores: NDArray[np.int16],
    at: int,
) -> None:
    fine_mask, coarse_mask = fill(I32x16, FINE_MASK), fill(I32x16, COARSE_MASK)
    fine_step, coarse_step = fill(I32x16, FINE_BITS), fill(I32x16, COARSE_BITS)
    zero, offsets = fill(I32x16, 0), fill(I32x16, offset)
    num_fine, num_coarse = size
    for block in range(first, last):
        sums = zero, zero, zero, zero
        i, m = block * (num_fine + num_coarse) * BLOCK_KEYS, place
        for _ in range(num_fine):
            sums = _add_word(sums, codes, i, multipliers, m, fine_mask, fine_step, 2)
            i, m = i + BLOCK_KEYS, m + 2
        for _ in range(num_coarse):
            sums = _add_word(sums, codes, i, multipliers, m, coarse_mask, coarse_step, 4)
            i, m = i + BLOCK_KEYS, m + 4
        _store_scores(scores, at + (block - first) * BLOCK_KEYS, sums[0], sums[1], sums[2], sums[3], offsets)


@inlined_kernel
def _add_word(sums, codes, at, multipliers, place, mask, step, count):  # type: ignore[no-untyped-def]
    """One query row's sums of 64 keys with a word's codes added, four at a time."""
    a, b, c, d = _load_word(codes, at)
    m = fill(I32x16, multipliers[np.uint64(place)])
    sums = _add_one(sums, a & mask, b & mask, c & mask, d & mask, m)
    for i in range(1, count):
        a, b, c, d = a >> step, b >> step, c >> step, d >> step
        m = fill(I32x16, multipliers[np.uint64(place + i)])
        sums = _add_one(sums, a & mask, b & mask, c & mask, d & mask, m)
    return sums


@inlined_kernel
def _add_one(sums, a, b, c, d, multiplier):  # type: ignore[no-untyped-def]
    return (
        add_byte_dots(sums[0], a, multiplier),
        add_byte_dots(sums[1], b, multiplier),
        add_byte_dots(sums[2], c, multiplier),
        add_byte_dots(sums[3], d, multiplier),
    )


@exact_kernel
def _score_four(
    codes: NDArray[np.uint32],
    size: tuple[int, int],
    first: int,
    last: int,
    multipliers: NDArray[np.int32],
    offsets: NDArray[np.int32],
    of_rows: tuple[int, int, int, int],
    scores: NDArray[np.int16],
    at: int,
    stride: int,
) -> None:
    fine_mask, coarse_mask = fill(I32x16, FINE_MASK), fill(I32x16, COARSE_MASK)
    fine_step, coarse_step = fill(I32x16, FINE_BITS), fill(I32x16, COARSE_BITS)
    zero = fill(I32x16, 0)
    num_fine, num_coarse = size
    place, row_multipliers, offset_place, row_offsets = of_rows
    none = zero, zero, zero, zero
    for block in range(first, last):
        a, b, c, d = none, none, none, none  # of 16 keys each, four rows' sums
        i, m = block * (num_fine + num_coarse) * BLOCK_KEYS, place
        for _ in range(num_fine):
            a, b, c, d = _add_word_of_four(
                a, b, c, d, codes, i, multipliers, m, row_multipliers, fine_mask, fine_step, 2
            )
            i, m = i + BLOCK_KEYS, m + 2
        for _ in range(num_coarse):
            a, b, c, d = _add_word_of_four(
                a, b, c, d, codes, i, multipliers, m, row_multipliers, coarse_mask, coarse_step, 4
            )
            i, m = i + BLOCK_KEYS, m + 4
        to = at + (block - first) * BLOCK_KEYS
        of_row = _of_rows(offsets, offset_place, row_offsets)
        _store_scores(scores, to, a[0], b[0], c[0], d[0], of_row[0])
        _store_scores(scores, to + stride, a[1], b[1], c[1], d[1], of_row[1])
        _store_scores(scores, to + 2 * stride, a[2], b[2], c[2], d[2], of_row[2])
        _store_scores(scores, to + 3 * stride, a[3], b[3], c[3], d[3], of_row[3])


@inlined_kernel
def _add_word_of_four(  # type: ignore[no-untyped-def]
    sums_a, sums_b, sums_c, sums_d, codes, at, multipliers, place, row_multipliers, mask, step, count
):
    a, b, c, d = _load_word(codes, at)
    m = _of_rows(multipliers, place, row_multipliers)
    sums_a, sums_b = _add_four(sums_a, a & mask, m), _add_four(sums_b, b & mask, m)
    sums_c, sums_d = _add_four(sums_c, c & mask, m), _add_four(sums_d, d & mask, m)
    for i in range(1, count):
        a, b, c, d = a >> step, b >> step, c >> step, d >> step
        m = _of_rows(multipliers, place + i, row_multipliers)
        sums_a, sums_b = _add_four(sums_a, a & mask, m), _add_four(sums_b, b & mask, m)
        sums_c, sums_d = _add_four(sums_c, c & mask, m), _add_four(sums_d, d & mask, m)
    return sums_a, sums_b, sums_c, sums_d


@inlined_kernel
def _add_four(sums, codes, multipliers):  # type: ignore[no-untyped-def]
    return (
        add_byte_dots(sums[0], codes, multipliers[0]),
        add_byte_dots(sums[1], codes, multipliers[1]),
        add_byte_dots(sums[2], codes, multipliers[2]),
        add_byte_dots(sums[3], codes, multipliers[3]),
    )


@inlined_kernel
def _of_rows(values, place, step):  # type: ignore[no-untyped-def]
    """Four rows' values, each in all lanes."""
    return (
        fill(I32x16, values[np.uint64(place)]),
        fill(I32x16, values[np.uint64(place + step)]),
        fill(I32x16, values[np.uint64(place + 2 * step)]),
        fill(I32x16, values[np.uint64(place + 3 * step)]),
    )


@inlined_kernel
def _load_word(codes, at):  # type: ignore[no-untyped-def]
    """A word of 64 keys; what is needed a little later is asked for."""
    for line in range(0, BLOCK_KEYS, LANES):
        prefetch_early(codes, at + AHEAD_WORDS + line)
    return (
        load(I32x16, codes, at),
        load(I32x16, codes, at + LANES),
        load(I32x16, codes, at + 2 * LANES),
        load(I32x16, codes, at + 3 * LANES),
    )


@inlined_kernel
def _store_scores(scores, at, a, b, c, d, offset):  # type: ignore[no-untyped-def]
    store(scores, at, narrow(a + a + offset, b + b + offset))
    store(scores, at + 2 * LANES, narrow(c + c + offset, d + d + offset))
