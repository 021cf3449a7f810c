"""Attention by codes to the rows of a context that are neither resident nor chosen."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel, readonly
from csattn.search.atomics import array_at
from csattn.search.lanes import fma
from csattn.search.match import widen
from csattn.search.simd import F32x16, U16x16, fill, floats_of_halves, load, store
from csattn.search.sketch import (
    describe_sketch,
    four_rows,
    project_queries,
    query_bytes,
    query_places,
    rows_of_segment,
    sketch_at,
    weigh_queries,
)
from csattn.search.sketch_scores import score_range
from csattn.search.worth import LOG2_E
from csattn.sketch.code_sums import CHUNK_KEYS, NOT_COUNTED, WEIGHT_BITS, WEIGHT_BYTES, add_code_sums, weigh_chunk
from csattn.sketch.codes import BLOCK_KEYS, FINE_CODES
from csattn.sketch.index import SketchIndex

LANES = 16
STEEPEST = 1e30  # slopes of weights: beyond, only the largest counts anyway


def attend_rest(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    index: SketchIndex,
    kv_indices: NDArray[np.int32],  # [num_tokens, num_kv_heads, top_k]: the chosen rows, ascending, -1 padded
    valid_len: NDArray[np.int32],  # [num_tokens, num_kv_heads]
    first: int,  # of the rows [first, stop) that may be chosen
    stop: int,
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention to the rows of [first, stop) that are not chosen: out like q and lse [num_tokens, num_q_heads].

    Where there are none, out is 0 and lse is -inf. `reference.attend_rest` is the definition.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    assert num_q_heads % index.num_heads == 0, f"{num_q_heads} query heads cannot be shared out to {index.num_heads}"
    assert kv_indices.shape[:2] == valid_len.shape == (num_tokens, index.num_heads)
    assert first >= 0 and stop <= index.context_len and head_dim == index.head_dim
    group_size = num_q_heads // index.num_heads
    sketch, queries = describe_sketch(index), np.empty(query_bytes(index, group_size), np.uint8)
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    chosen = readonly(np.ascontiguousarray(kv_indices)), readonly(np.ascontiguousarray(valid_len))
    _attend(
        readonly(np.ascontiguousarray(q)), sketch.ctypes.data, *chosen, first, stop, softmax_scale, queries, out, lse
    )
    return out, lse


@exact_kernel
def _attend(
    q: NDArray[np.float32],
    sketch_address: int,
    kv_indices: NDArray[np.int32],
    valid_len: NDArray[np.int32],
    first: int,
    stop: int,
    softmax_scale: float,
    queries: NDArray[np.uint8],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:
    sketch, memory = sketch_at(sketch_address), queries.ctypes.data
    num_tokens, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // sketch.num_heads
    parts = np.empty((group_size, head_dim + 2), np.float32)
    for token in range(num_tokens):
        for head in range(sketch.num_heads):
            group = q[token, head * group_size : (head + 1) * group_size].reshape(-1)
            project_queries(sketch, head, widen(group), 0, sketch.num_segments, memory)
            weigh_queries(sketch, group_size, memory)
            chosen = kv_indices[token, head, : valid_len[token, head]]
            attend_rows(
                sketch, head, memory, group_size, first, stop, chosen, softmax_scale, parts.ctypes.data, head_dim + 2
            )
            for g in range(group_size):
                row, total = head * group_size + g, parts[g, head_dim + 1]
                lse[token, row] = parts[g, head_dim] + (math.log(total) if total > 0 else 0.0)
                for i in range(head_dim):
                    out[token, row, i] = parts[g, i] / total if total > 0 else np.float32(0.0)


@exact_kernel
def attend_rows(
    sketch: Any,
    head: int,
    queries: int,  # address of the group's queries, weighed: see `csattn.search.sketch`
    group_size: int,
    first: int,  # of the rows [first, stop)
    stop: int,
    chosen: NDArray[np.int32],  # ascending: these do not count
    softmax_scale: float,
    parts: int,  # address of the query rows' results, float32, every part_words: [head_dim] sums of e^(logit - largest)
    part_words: int,  # times value, then the largest (about; -inf where no row counts), then the sum of e^(...)
) -> None:
    """Attention by codes, as a piece that can be merged with others."""
    head_dim, num_segments = sketch.head_dim, sketch.num_segments
    starts = array_at(sketch.segment_starts, num_segments, np.int32(0))
    tops, totals = np.full(group_size, -np.inf, np.float64), np.zeros(group_size, np.float64)
    for g in range(group_size):
        array_at(parts + 4 * g * part_words, head_dim + 2, np.float32(0))[:] = 0.0
    for segment in range(num_segments):
        begin, end = rows_of_segment(starts, segment, first, stop)
        if begin < end:
            of_segment = _sum_segment(sketch, head, queries, group_size, begin, end, chosen, softmax_scale)
            values = _values_of(sketch, head, queries, group_size, segment, softmax_scale, of_segment[1], of_segment[2])
            _join(of_segment[0], of_segment[1], values, tops, totals, parts, part_words)
    for g in range(group_size):
        part = array_at(parts + 4 * g * part_words, head_dim + 2, np.float32(0))
        base = array_at(queries + 16 * g, 2, np.float64(0))[1]
        part[head_dim] = softmax_scale * base + tops[g] / LOG2_E if totals[g] > 0 else -np.inf
        part[head_dim + 1] = totals[g]


@exact_kernel
def _sum_segment(
    sketch: Any,
    head: int,
    queries: int,
    group_size: int,
    first: int,  # rows of one segment
    stop: int,
    chosen: NDArray[np.int32],
    softmax_scale: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32]]:
    """Of each query row the log2 of the largest weight, about, the sum of the weights in units of that, and their sums
    with the fine codes as of `add_code_sums`.
    """
    num_words = sketch.num_fine + sketch.num_coarse
    of_head = sketch.num_blocks * num_words * BLOCK_KEYS
    codes = array_at(sketch.codes + 4 * head * of_head, of_head, np.uint32(0))
    row_sums, row_weights = 2 * LANES * sketch.num_fine, CHUNK_KEYS * WEIGHT_BYTES // 4
    tops, totals = np.full(group_size, -np.inf, np.float64), np.zeros(group_size, np.float64)
    sums, scales = np.zeros(group_size * row_sums, np.float32), np.empty(group_size, np.float32)
    scores, weights = np.empty(group_size * CHUNK_KEYS, np.int16), np.empty(group_size * row_weights, np.int32)
    next_chosen = np.searchsorted(chosen, first)
    for chunk in range(first // CHUNK_KEYS * CHUNK_KEYS, stop, CHUNK_KEYS):
        end = min(chunk + CHUNK_KEYS, stop)
        score_range(sketch, head, queries, group_size, chunk, end, scores, CHUNK_KEYS, 0)
        room = -(-(end - chunk) // BLOCK_KEYS) * BLOCK_KEYS
        _leave_out(scores, group_size, 0, first - chunk)
        _leave_out(scores, group_size, end - chunk, room)
        while next_chosen < len(chosen) and chosen[next_chosen] < end:
            at = np.int64(chosen[next_chosen]) - chunk
            _leave_out(scores, group_size, at, at + 1)
            next_chosen += 1
        for g in range(group_size):
            unit = array_at(queries + 16 * g, 2, np.float64(0))[0]
            slope = np.float32(min(softmax_scale * LOG2_E * unit, STEEPEST))
            top, total = weigh_chunk(scores, g * CHUNK_KEYS, room, slope, weights, g * row_weights)
            factor = 0.0
            if top > tops[g]:
                factor = 2.0 ** (tops[g] - top)
                totals[g] *= factor
                for i in range(g * row_sums, (g + 1) * row_sums):
                    sums[i] *= np.float32(factor)
                tops[g] = top
            scale = 2.0 ** (top - tops[g] - WEIGHT_BITS) if total > 0 else 0.0
            totals[g] += scale * total
            scales[g] = scale
        block = chunk // BLOCK_KEYS
        add_code_sums(
            codes, sketch.num_fine, num_words, block, block + room // BLOCK_KEYS, weights, row_weights, scales, sums,
            row_sums,
        )  # fmt: skip
    return tops, totals, sums


@exact_kernel
def _leave_out(scores: NDArray[np.int16], group_size: int, first: int, last: int) -> None:
    for g in range(group_size):
        for i in range(g * CHUNK_KEYS + first, g * CHUNK_KEYS + last):
            scores[i] = NOT_COUNTED


@exact_kernel
def _values_of(
    sketch: Any,
    head: int,
    queries: int,
    group_size: int,
    segment: int,
    softmax_scale: float,
    totals: NDArray[np.float64],
    sums: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Sums of weight times value [group_size * head_dim], told from the sums of the fine codes and from the query."""
    head_dim, num_coords, place = sketch.head_dim, sketch.num_coords, head * sketch.num_segments + segment
    size = num_coords * head_dim
    mean = array_at(sketch.value_mean + 4 * place * head_dim, head_dim, np.float32(0))
    transform = array_at(sketch.value_transform + 2 * place * size, size, np.uint16(0))
    values, codes = np.empty(group_size * head_dim, np.float32), np.empty(group_size * num_coords, np.float32)
    for g in range(group_size):
        _mean_codes(sketch, queries, group_size, g, segment, softmax_scale, totals[g], sums, codes)
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
    softmax_scale: float,
    total: float,
    sums: NDArray[np.float32],
    codes: NDArray[np.float32],
) -> None:
    """A query row's sums of weight times c, of the coarse ones as the query tells: codes [group_size, num_coords]"""
    num_coords, num_fine = sketch.num_coords, FINE_CODES * sketch.num_fine
    _, _, at_coordinates, _, _ = query_places(sketch, group_size)
    of_segment = queries + at_coordinates + 4 * (g * sketch.num_segments + segment) * num_coords
    coordinates = array_at(of_segment, num_coords, np.float32(0))
    for j in range(num_fine):
        at = g * 4 * num_fine + j // 4 * LANES + j % 4
        codes[g * num_coords + j] = 2.0 * (sums[at] + sums[at + 4] + sums[at + 8] + sums[at + 12]) - 15.0 * total
    for j in range(num_fine, num_coords):
        codes[g * num_coords + j] = total * softmax_scale * np.float64(coordinates[j])


@exact_kernel
def _last_values(
    mean: NDArray[np.float32],
    transform: NDArray[np.uint16],
    num_coords: int,
    totals: NDArray[np.float64],
    codes: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    """Of the dimensions behind the last whole vector; what is loaded with them ends with the transform."""
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
    tops: NDArray[np.float64],
    totals: NDArray[np.float64],
    values: NDArray[np.float32],
    all_tops: NDArray[np.float64],
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
        before, now = 2.0 ** (all_tops[g] - top), 2.0 ** (tops[g] - top)
        all_totals[g] = before * all_totals[g] + now * totals[g]
        all_tops[g] = top
        for i in range(head_dim):
            part[i] = np.float32(before) * part[i] + np.float32(now) * values[g * head_dim + i]
