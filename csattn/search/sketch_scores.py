"""Scores of coded keys: sums of codes times 8-bit multipliers. A code that is loaded serves four query heads.

`sketch_group_scores` describes how scores are stored.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.byte_lanes import add_half_dots, bits_of_bytes, join_halves
from csattn.cpu.jit import exact_kernel, inlined_kernel
from csattn.cpu.simd import LANES, TILE_LANES, I32xTile, fill, load, prefetch_early, store
from csattn.search.sketch import query_places, rows_of_segment
from csattn.search.sketch_group_scores import BIAS, write_maxima_of_eights
from csattn.sketch.codes import BLOCK_KEYS, COARSE_BITS, FINE_BITS
from csattn.sketch.reference import NORMALISER_KEYS

AHEAD_WORDS = 16384  # prefetch distance: 64 KiB; the hardware's prefetch stops at every page
TILE_KEYS = 4 * TILE_LANES  # their sums, for four rows, stay in registers
STEP_KEYS = 1024  # their codes stay in the caches while all rows of the group are scored


@exact_kernel
def score_range(
    sketch: Any,
    head: int,
    queries: int,  # address of the group's weighed queries: see `csattn.search.sketch`
    group_size: int,
    first: int,  # of the keys [first, last): a multiple of 64
    last: int,
    scores: NDArray[np.uint16],  # row g's are written from g * stride + at on, up to 63 past the last key
    stride: int,
    at: int,
    # row g's are written from (g * stride + at) / NORMALISER_KEYS on: see `write_maxima_of_eights`; empty: not wanted
    greatest: NDArray[np.uint16],
) -> None:
    """Score some keys for all query rows of a group; BIAS is added to scores."""
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
            if len(greatest) > 0:
                for row in range(group_size):
                    place = row * stride + at + key - first
                    num_keys = min(STEP_KEYS, end - key)
                    write_maxima_of_eights(scores, place, num_keys, greatest, place // NORMALISER_KEYS)


@exact_kernel
def score_blocks(
    codes: NDArray[np.uint32],  # flat; whole blocks
    num_fine: int,  # words of 4-bit codes of a key
    num_coarse: int,
    first: int,  # of the blocks [first, last)
    last: int,
    multipliers: NDArray[np.int32],  # row g's begin at g * row_multipliers: four of 8 bits in each word
    row_multipliers: int,
    offsets: NDArray[np.int32],  # row g's is at g * row_offsets
    row_offsets: int,
    group_size: int,
    scores: NDArray[np.uint16],  # row g's are written from g * stride + at on: 64 for each block
    stride: int,
    at: int,
) -> None:
    """Compute scores: the sum over coordinates of multiplier * code, plus offset and BIAS."""
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
            four = min(row, group_size - 4)  # some rows are scored twice if group_size is no multiple of four
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
    scores: NDArray[np.uint16],
    at: int,
) -> None:
    begin = fill(I32xTile, _biased(offset))
    num_fine, num_coarse = size
    words = num_fine + num_coarse
    for tile in range(first * BLOCK_KEYS, last * BLOCK_KEYS, TILE_KEYS):
        sums = begin, begin, begin, begin
        i, m = _place_of(tile, words), place
        for _ in range(num_fine):
            sums = _add_fine(sums, codes, i, multipliers, m)
            i, m = i + BLOCK_KEYS, m + 2
        for _ in range(num_coarse):
            sums = _add_coarse(sums, codes, i, multipliers, m)
            i, m = i + BLOCK_KEYS, m + 4
        _store_scores(scores, at + tile - first * BLOCK_KEYS, sums[0], sums[1], sums[2], sums[3])


@inlined_kernel
def _place_of(key, words):  # type: ignore[no-untyped-def]
    """Return the place of a key's first word. A block has the first words of all its keys, then the second, ..."""
    return key // BLOCK_KEYS * words * BLOCK_KEYS + key % BLOCK_KEYS


@inlined_kernel
def _add_fine(sums, codes, at, multipliers, place):  # type: ignore[no-untyped-def]
    """Add a word's codes, four at a time, to one query row's sums for a tile of keys."""
    word = _load_word(codes, at)
    sums = _add_one(sums, word, 0, FINE_BITS, multipliers[np.uint64(place)])
    return _add_one(sums, word, 4, FINE_BITS, multipliers[np.uint64(place + 1)])


@inlined_kernel
def _add_coarse(sums, codes, at, multipliers, place):  # type: ignore[no-untyped-def]
    word = _load_word(codes, at)
    sums = _add_one(sums, word, 0, COARSE_BITS, multipliers[np.uint64(place)])
    sums = _add_one(sums, word, 2, COARSE_BITS, multipliers[np.uint64(place + 1)])
    sums = _add_one(sums, word, 4, COARSE_BITS, multipliers[np.uint64(place + 2)])
    return _add_one(sums, word, 6, COARSE_BITS, multipliers[np.uint64(place + 3)])


@inlined_kernel
def _add_one(sums, word, first, count, multiplier):  # type: ignore[no-untyped-def]
    m = fill(I32xTile, multiplier)
    return (
        add_half_dots(sums[0], bits_of_bytes(word[0], first, count), m),
        add_half_dots(sums[1], bits_of_bytes(word[1], first, count), m),
        add_half_dots(sums[2], bits_of_bytes(word[2], first, count), m),
        add_half_dots(sums[3], bits_of_bytes(word[3], first, count), m),
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
    scores: NDArray[np.uint16],
    at: int,
    stride: int,
) -> None:
    num_fine, num_coarse = size
    place, row_multipliers, offset_place, row_offsets = of_rows
    begin = (
        fill(I32xTile, _biased(offsets[offset_place])),
        fill(I32xTile, _biased(offsets[offset_place + row_offsets])),
        fill(I32xTile, _biased(offsets[offset_place + 2 * row_offsets])),
        fill(I32xTile, _biased(offsets[offset_place + 3 * row_offsets])),
    )
    words = num_fine + num_coarse
    for tile in range(first * BLOCK_KEYS, last * BLOCK_KEYS, TILE_KEYS):
        a, b, c, d = begin, begin, begin, begin  # each: four rows' sums for a quarter of the keys
        i, m = _place_of(tile, words), place
        for _ in range(num_fine):
            a, b, c, d = _add_fine_to_four(a, b, c, d, codes, i, multipliers, m, row_multipliers)
            i, m = i + BLOCK_KEYS, m + 2
        for _ in range(num_coarse):
            a, b, c, d = _add_coarse_to_four(a, b, c, d, codes, i, multipliers, m, row_multipliers)
            i, m = i + BLOCK_KEYS, m + 4
        to = at + tile - first * BLOCK_KEYS
        _store_scores(scores, to, a[0], b[0], c[0], d[0])
        _store_scores(scores, to + stride, a[1], b[1], c[1], d[1])
        _store_scores(scores, to + 2 * stride, a[2], b[2], c[2], d[2])
        _store_scores(scores, to + 3 * stride, a[3], b[3], c[3], d[3])


@inlined_kernel
def _add_fine_to_four(a, b, c, d, codes, at, multipliers, place, row_multipliers):  # type: ignore[no-untyped-def]
    """Add a word's codes, four at a time, to four rows' sums; a, b, c and d each have a quarter of the tile's keys."""
    word = _load_word(codes, at)
    a, b, c, d = _add_bits(a, b, c, d, word, 0, FINE_BITS, _of_rows(multipliers, place, row_multipliers))
    return _add_bits(a, b, c, d, word, 4, FINE_BITS, _of_rows(multipliers, place + 1, row_multipliers))


@inlined_kernel
def _add_coarse_to_four(a, b, c, d, codes, at, multipliers, place, row_multipliers):  # type: ignore[no-untyped-def]
    word = _load_word(codes, at)
    a, b, c, d = _add_bits(a, b, c, d, word, 0, COARSE_BITS, _of_rows(multipliers, place, row_multipliers))
    a, b, c, d = _add_bits(a, b, c, d, word, 2, COARSE_BITS, _of_rows(multipliers, place + 1, row_multipliers))
    a, b, c, d = _add_bits(a, b, c, d, word, 4, COARSE_BITS, _of_rows(multipliers, place + 2, row_multipliers))
    return _add_bits(a, b, c, d, word, 6, COARSE_BITS, _of_rows(multipliers, place + 3, row_multipliers))


@inlined_kernel
def _add_bits(a, b, c, d, word, first, count, multipliers):  # type: ignore[no-untyped-def]
    return (
        _add_four(a, bits_of_bytes(word[0], first, count), multipliers),
        _add_four(b, bits_of_bytes(word[1], first, count), multipliers),
        _add_four(c, bits_of_bytes(word[2], first, count), multipliers),
        _add_four(d, bits_of_bytes(word[3], first, count), multipliers),
    )


@inlined_kernel
def _add_four(sums, codes, multipliers):  # type: ignore[no-untyped-def]
    return (
        add_half_dots(sums[0], codes, multipliers[0]),
        add_half_dots(sums[1], codes, multipliers[1]),
        add_half_dots(sums[2], codes, multipliers[2]),
        add_half_dots(sums[3], codes, multipliers[3]),
    )


@inlined_kernel
def _of_rows(values, place, step):  # type: ignore[no-untyped-def]
    """Return four rows' values, each in all lanes of a vector."""
    return (
        fill(I32xTile, values[np.uint64(place)]),
        fill(I32xTile, values[np.uint64(place + step)]),
        fill(I32xTile, values[np.uint64(place + 2 * step)]),
        fill(I32xTile, values[np.uint64(place + 3 * step)]),
    )


@inlined_kernel
def _load_word(codes, at):  # type: ignore[no-untyped-def]
    """Load a word of a tile of keys, and prefetch the words needed a little later."""
    for line in range(0, TILE_KEYS, LANES):
        prefetch_early(codes, at + AHEAD_WORDS + line)
    return (
        load(I32xTile, codes, at),
        load(I32xTile, codes, at + TILE_LANES),
        load(I32xTile, codes, at + 2 * TILE_LANES),
        load(I32xTile, codes, at + 3 * TILE_LANES),
    )


@inlined_kernel
def _store_scores(scores, at, a, b, c, d):  # type: ignore[no-untyped-def]
    store(scores, at, join_halves(a, b))
    store(scores, at + 2 * TILE_LANES, join_halves(c, d))


@inlined_kernel
def _biased(offset):  # type: ignore[no-untyped-def]
    """Return what sums begin with, modulo 2**16, as scores are stored."""
    return (np.int64(offset) + BIAS) & 0xFFFF
