"""Attention by codes to the rows of a range that are not chosen, from a search's scores or from new ones.

A part is the result of one query row, head_dim + 2 float32: the sum of e^(logit - top) * value, then the top, a logit
(about the largest; -inf if no row counts), then the sum of e^(logit - top).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, lane_0
from csattn.cpu.simd import LANES, F32x16, U16x16, fill, floats_of_halves, load, store
from csattn.search.code_sums import CHUNK_KEYS, WEIGHT_BITS, WEIGHT_BYTES, add_code_sums, compute_weights
from csattn.search.group_scores import ROUNDER, exp2_lanes
from csattn.search.sketch import exponent_of, four_rows, query_places, rows_of_segment
from csattn.search.sketch_group_scores import BIAS, NOT_COUNTED
from csattn.search.sketch_scores import score_range
from csattn.sketch.codes import BLOCK_KEYS, FINE_CODES
from csattn.sketch.reference import LOG2_E

LEAST_OCTAVES = -120.0


@exact_kernel
def attend_rows(
    sketch: Any,
    head: int,
    queries: int,  # address of the group's weighed queries: see `csattn.search.sketch`
    group_size: int,
    first: int,  # of the rows [first, stop)
    stop: int,
    chosen: NDArray[np.int32],  # ascending: these rows are left out
    # query row g's of key i is at g * stride + i. Overwritten: scores of rows that do not count, and up to CHUNK_KEYS
    # before `first` and 63 from `stop` on. Empty, stride 0: there are no scores yet, and rows are scored here
    scores: NDArray[np.uint16],
    stride: int,
    parts: int,  # address of the query rows' parts, written
    part_words: int,  # from one part to the next
) -> None:
    """Compute the query rows' parts from the scores of some rows."""
    if stride == 0:
        scores = np.empty(group_size * CHUNK_KEYS, np.uint16)
    head_dim, num_segments, unit = sketch.head_dim, sketch.num_segments, 2.0 ** exponent_of(queries)
    starts = array_at(sketch.segment_starts, num_segments, np.int32(0))
    means = array_at(queries + query_places(sketch, group_size)[1], group_size * num_segments, np.float32(0))
    tops, totals = np.zeros(group_size, np.int64), np.zeros(group_size, np.float64)
    for g in range(group_size):
        array_at(parts + 4 * g * part_words, head_dim + 2, np.float32(0))[:] = 0.0
    for segment in range(num_segments):
        begin, end = rows_of_segment(starts, segment, first, stop)
        if begin < end:
            of_segment = _sum_segment(sketch, head, queries, group_size, begin, end, chosen, scores, stride)
            values = _values_of(sketch, head, queries, group_size, segment, of_segment[1], of_segment[2])
            _join(unit, of_segment[0], of_segment[1], values, tops, totals, parts, part_words)
    for g in range(group_size):
        part = array_at(parts + 4 * g * part_words, head_dim + 2, np.float32(0))
        logit = (np.float64(means[g * num_segments]) + unit * (tops[g] - BIAS)) / LOG2_E
        part[head_dim] = logit if totals[g] > 0 else -np.inf
        part[head_dim + 1] = totals[g]


@exact_kernel
def join_parts(
    parts: int,  # address of float32, one part every part_words
    part_words: int,
    num_parts: int,
    head_dim: int,
    joined: NDArray[np.float32],  # [head_dim + 2], written
) -> None:
    """Merge several parts of the same query row into one, in their order."""
    all_parts = array_at(parts, num_parts * part_words, np.float32(0))
    top = np.float32(-np.inf)
    for at in range(head_dim, num_parts * part_words, part_words):
        if not all_parts[at] <= top:  # also if it is NaN: then the following parts' are, too
            top = all_parts[at]
    joined[:] = 0.0
    joined[head_dim] = top
    for i in range(num_parts):
        at = i * part_words
        if all_parts[at + head_dim + 1] > 0:
            scale = np.float32(np.exp(np.float64(all_parts[at + head_dim]) - top))
            for j in range(head_dim):
                joined[j] += scale * all_parts[at + j]
            joined[head_dim + 1] += scale * all_parts[at + head_dim + 1]


@exact_kernel
def _sum_segment(
    sketch: Any,
    head: int,
    queries: int,
    group_size: int,
    first: int,  # rows of one segment
    stop: int,
    chosen: NDArray[np.int32],
    scores: NDArray[np.uint16],
    stride: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32]]:
    """Return each query row's largest score and, in units of that score's weight, the sum of the weights and the
    weighted sums of fine codes (see `add_code_sums`).
    """
    num_words, exponent = sketch.num_fine + sketch.num_coarse, exponent_of(queries)
    unit = 2.0**exponent
    of_head = sketch.num_blocks * num_words * BLOCK_KEYS
    codes = array_at(sketch.codes + 4 * head * of_head, of_head, np.uint32(0))
    row_sums, row_weights = 2 * LANES * sketch.num_fine, CHUNK_KEYS * WEIGHT_BYTES // 4
    tops, totals = np.zeros(group_size, np.int64), np.zeros(group_size, np.float64)
    sums, scales = np.zeros(group_size * row_sums, np.float32), np.empty(group_size, np.float32)
    weights, nothing = _lines(group_size * row_weights), np.empty(0, np.uint16)
    next_chosen = np.searchsorted(chosen, first)
    for chunk in range(first // CHUNK_KEYS * CHUNK_KEYS, stop, CHUNK_KEYS):
        end = min(chunk + CHUNK_KEYS, stop)
        at, step = chunk, stride
        if stride == 0:
            at, step = 0, CHUNK_KEYS
            score_range(sketch, head, queries, group_size, chunk, end, scores, CHUNK_KEYS, 0, nothing)
        room = -(-(end - chunk) // BLOCK_KEYS) * BLOCK_KEYS
        _exclude_keys(scores, group_size, step, at, at + first - chunk)
        _exclude_keys(scores, group_size, step, at + end - chunk, at + room)
        while next_chosen < len(chosen) and chosen[next_chosen] < end:
            for g in range(group_size):
                scores[g * step + at + np.int64(chosen[next_chosen]) - chunk] = NOT_COUNTED
            next_chosen += 1
        block = chunk // BLOCK_KEYS
        for g in range(group_size):
            word = (block * num_words + g % sketch.num_fine) * BLOCK_KEYS
            top, total = compute_weights(
                scores, g * step + at, room, exponent, weights, g * row_weights, codes, word, num_words * BLOCK_KEYS
            )
            if top > tops[g]:
                _raise_top(unit, top, g, tops, totals, sums)
            scales[g] = _weight_of(unit * (top - tops[g]) - WEIGHT_BITS) if total > 0 else 0.0
            totals[g] += np.float64(scales[g]) * total
        add_code_sums(
            codes, sketch.num_fine, num_words, block, block + room // BLOCK_KEYS, weights, row_weights, scales, sums,
            row_sums,
        )  # fmt: skip
    return tops, totals, sums


@exact_kernel
def _lines(num_words: int) -> NDArray[np.int32]:
    """Return memory that begins at a cache line: vectors that straddle two lines take twice as long."""
    memory = np.empty(num_words + LANES, np.int32)
    first = -(memory.ctypes.data // 4) % LANES
    lines: NDArray[np.int32] = memory[first : first + num_words]
    return lines


@exact_kernel
def _exclude_keys(scores: NDArray[np.uint16], group_size: int, stride: int, first: int, last: int) -> None:
    for g in range(group_size):
        for i in range(g * stride + first, g * stride + last):
            scores[i] = NOT_COUNTED


@exact_kernel
def _raise_top(unit: float, top: int, g: int, tops: Any, totals: Any, sums: Any) -> None:
    """Rescale a query row's total and sums to units of the weight of the score `top`."""
    factor, row_sums = np.exp2(unit * (tops[g] - top)), len(sums) // len(tops)
    totals[g] *= factor
    for i in range(g * row_sums, (g + 1) * row_sums):
        sums[i] *= np.float32(factor)
    tops[g] = top


@exact_kernel
def _weight_of(octaves: float) -> Any:
    """Return 2**octaves for octaves of 0 and less, at least LEAST_OCTAVES, with a relative error of 1e-5 at most."""
    lanes = fill(F32x16, max(octaves, LEAST_OCTAVES))
    return lane_0(exp2_lanes(lanes, fill(F32x16, 1.0), fill(F32x16, ROUNDER)))


@exact_kernel
def _values_of(
    sketch: Any,
    head: int,
    queries: int,
    group_size: int,
    segment: int,
    totals: NDArray[np.float64],
    sums: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return sums of weight * value [group_size * head_dim], predicted from sums of fine codes and from the query."""
    head_dim, num_coords, place = sketch.head_dim, sketch.num_coords, head * sketch.num_segments + segment
    size = num_coords * head_dim
    mean = array_at(sketch.value_mean + 4 * place * head_dim, head_dim, np.float32(0))
    transform = array_at(sketch.value_transform + 2 * place * size, size, np.uint16(0))
    values, codes = np.empty(group_size * head_dim, np.float32), np.empty(group_size * num_coords, np.float32)
    for g in range(group_size):
        _mean_codes(sketch, queries, group_size, g, segment, totals[g], sums, codes)
    whole = head_dim - head_dim % LANES
    for row in range(0, group_size, 4):
        r0, r1, r2, r3 = four_rows(row, group_size)
        c0, c1, c2, c3 = r0 * num_coords, r1 * num_coords, r2 * num_coords, r3 * num_coords
        for i in range(0, whole, LANES):
            of_mean = load(F32x16, mean, i)
            w, x = of_mean * fill(F32x16, totals[r0]), of_mean * fill(F32x16, totals[r1])
            y, z = of_mean * fill(F32x16, totals[r2]), of_mean * fill(F32x16, totals[r3])
            for j in range(num_coords):
                column = floats_of_halves(load(U16x16, transform, j * head_dim + i))
                w = fma(fill(F32x16, codes[np.uint64(c0 + j)]), column, w)
                x = fma(fill(F32x16, codes[np.uint64(c1 + j)]), column, x)
                y = fma(fill(F32x16, codes[np.uint64(c2 + j)]), column, y)
                z = fma(fill(F32x16, codes[np.uint64(c3 + j)]), column, z)
            store(values, r0 * head_dim + i, w)
            store(values, r1 * head_dim + i, x)
            store(values, r2 * head_dim + i, y)
            store(values, r3 * head_dim + i, z)
    if whole < head_dim:
        _last_values(mean, transform, num_coords, totals, codes, values)
    return values


@exact_kernel
def _mean_codes(
    sketch: Any,
    queries: int,
    group_size: int,
    g: int,
    segment: int,
    total: float,
    sums: NDArray[np.float32],
    codes: NDArray[np.float32],
) -> None:
    """Write a query row's sums of weight * code, predicted from the query for coarse codes.

    codes: [group_size, num_coords].
    """
    num_coords, num_fine = sketch.num_coords, FINE_CODES * sketch.num_fine
    _, _, at_coordinates, _, _ = query_places(sketch, group_size)
    of_segment = queries + at_coordinates + 4 * (g * sketch.num_segments + segment) * num_coords
    coordinates = array_at(of_segment, num_coords, np.float32(0))
    for j in range(num_fine):
        at = g * 4 * num_fine + j // 4 * LANES + j % 4
        codes[g * num_coords + j] = sums[at] + sums[at + 4] + sums[at + 8] + sums[at + 12]
    for j in range(num_fine, num_coords):
        codes[g * num_coords + j] = total * (np.float64(coordinates[j]) / LOG2_E)


@exact_kernel
def _last_values(
    mean: NDArray[np.float32],
    transform: NDArray[np.uint16],
    num_coords: int,
    totals: NDArray[np.float64],
    codes: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    """Compute the dimensions after the last whole vector. Loads end with the transform at the latest."""
    head_dim, row = len(mean), np.empty(LANES, np.float32)
    for g in range(len(totals)):
        for i in range(head_dim - head_dim % LANES, head_dim):
            total = np.float32(totals[g]) * mean[i]
            for j in range(num_coords):
                at = min(j * head_dim + i, len(transform) - LANES)
                store(row, 0, floats_of_halves(load(U16x16, transform, at)))
                total += codes[g * num_coords + j] * row[j * head_dim + i - at]
            values[g * head_dim + i] = total


@exact_kernel
def _join(
    unit: float,
    tops: NDArray[np.int64],
    totals: NDArray[np.float64],
    values: NDArray[np.float32],
    all_tops: NDArray[np.int64],
    all_totals: NDArray[np.float64],
    parts: int,
    part_words: int,
) -> None:
    """Add a segment's sums to those of the segments before."""
    group_size = len(tops)
    head_dim = len(values) // group_size
    for g in range(group_size):
        if not totals[g] > 0:
            continue
        part = array_at(parts + 4 * g * part_words, head_dim, np.float32(0))
        top = max(tops[g], all_tops[g])
        before, now = np.exp2(unit * (all_tops[g] - top)), np.exp2(unit * (tops[g] - top))
        all_totals[g] = before * all_totals[g] + now * totals[g]
        all_tops[g] = top
        for i in range(head_dim):
            part[i] = np.float32(before) * part[i] + np.float32(now) * values[g * head_dim + i]
