"""Attention of a step's rows on the CPU, to rows of contexts and tails in place: nothing is gathered.

The rows that a head attends to form one list: sinks, selected rows and window of the context, then the tail's selected
rows and all tail rows after those with a sketch. The list is cut into ranges by its length alone (as in
flash-decoding), each range is attended to as a separate piece, and the ranges are merged in order. So a row's result
depends neither on the other rows of the step nor on the number of threads. The rest, the rows that may be selected and
are not, is cut in the same way if it is attended to by a sketch and does not come with the selection.
`in_place_reference` is the definition.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.attention.coded_rows import add_coded_values, score_coded
from csattn.attention.in_place_arguments import (
    MAX_PARTS,
    MAX_RANGES,
    arguments_at,
    chosen_of,
    list_len_of,
    valid_len_of,
)
from csattn.attention.in_place_rest import rest_ranges_of
from csattn.attention.row_math import add_weighted_values, cap_logits, score_16, softmax_weights
from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import bytes_of, word_of
from csattn.cpu.floats import exp_lanes
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES, F32x16, fill, prefetch, store
from csattn.rest.estimate import rest_of_head

RANGE_ROWS = 256


def num_ranges(list_len: int) -> int:
    """The number of ranges that a list of that many rows is cut into."""
    ranges: int = -(-list_len // _range_rows(list_len))
    return ranges


def attend_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Attend to one range. KV rows have the type of `like`.

    A piece is a range of one index head's list: there are max_index_heads * max_ranges for each row of the step.
    """
    args, itemsize = arguments_at(arguments), bytes_of(like)
    # neighbouring rows are likely to read the same KV rows of a head: its window, and those that many choose
    num_rows = word_of(args.num_rows, 0)
    row, head_range = piece % num_rows, piece // num_rows
    head, number = head_range // args.max_ranges, head_range % args.max_ranges
    num_index_heads = word_of(args.num_index_heads, row)
    if head >= num_index_heads:
        return 0
    list_len = list_len_of(args, row, head)
    range_rows = _range_rows(list_len)
    first, last = number * range_rows, min((number + 1) * range_rows, list_len)
    if first >= last:
        return 0
    num_q_heads, head_dim = args.num_q_heads, args.head_dim
    group_size = num_q_heads // num_index_heads
    count = last - first
    room = -(-count // LANES) * LANES
    rows = np.empty(room, np.int64)
    num_context = _addresses(args, row, head, first, count, 2 * head_dim * itemsize, rows)
    for i in range(count, room):
        rows[i] = rows[count - 1]  # a valid address; its weight will be 0
    if num_context == count:
        num_context = room
    coded = word_of(args.k_readers, row) != 0
    q = array_at(args.q + 4 * (row * num_q_heads + head * group_size) * head_dim, group_size * head_dim, np.float32(0))
    scale = array_at(args.softmax_scale, 1, np.float64(0))[0]
    weights = np.empty(group_size * room, np.float32)
    if coded:
        reader, row_bytes = word_of(args.k_readers, row), word_of(args.row_bytes, row)
        score_coded(q, rows, num_context, reader, row_bytes, like, head_dim, group_size, scale, weights)
    else:
        _score(q, rows, like, itemsize, head_dim, group_size, scale, weights)
    if args.logit_cap != 0:
        cap_logits(weights, array_at(args.logit_cap, 1, np.float64(0))[0])
    part_words = head_dim + 2
    parts = args.parts + 4 * ((row * num_q_heads + head * group_size) * MAX_PARTS + number) * part_words
    for g in range(group_size):
        part = array_at(parts + 4 * g * MAX_PARTS * part_words, part_words, np.float32(0))
        softmax_weights(weights, g * room, count, room, part, head_dim)
        part[:head_dim] = 0.0
        if not coded:
            add_weighted_values(weights, g * room, rows, room, head_dim, like, head_dim, part)
    if coded:
        reader, offset = word_of(args.v_readers, row), word_of(args.v_offsets, row)
        part_bytes = 4 * MAX_PARTS * part_words
        add_coded_values(
            weights, rows, num_context, reader, offset, like, itemsize, head_dim, group_size, parts, part_bytes
        )
    return 0


def merge_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Merge what `attend_stage` and `rest_stage` wrote to `parts`. A piece is one query head of a row."""
    args = arguments_at(arguments)
    row, q_head = piece // args.num_q_heads, piece % args.num_q_heads
    num_q_heads, head_dim, num_index_heads = args.num_q_heads, args.head_dim, word_of(args.num_index_heads, row)
    if num_index_heads == 0:
        return 0
    head = q_head // (num_q_heads // num_index_heads)
    words, list_len, own = head_dim + 2, list_len_of(args, row, head), row + args.own_rows
    ranges = -(-list_len // _range_rows(list_len))
    rest_ranges, own_ranges = rest_ranges_of(args, row), rest_ranges_of(args, own)
    num_parts = ranges + rest_ranges + own_ranges
    place = (row * num_q_heads + q_head) * MAX_PARTS * words
    parts = array_at(args.parts + 4 * place, MAX_PARTS * words, np.float32(0))
    out = array_at(args.out + 4 * (row * num_q_heads + q_head) * head_dim, head_dim, np.float32(0))
    rest = np.zeros(head_dim, np.float32)
    top = rest_top = _rest(args, row, q_head, rest)
    given = _given_rest(args, row, q_head), _given_rest(args, own, q_head)
    for part in given:
        if len(part) > 0:
            top = max(top, part[head_dim])
    sink = np.float32(-np.inf) if args.sinks == 0 else array_at(args.sinks, num_q_heads, np.float32(0))[q_head]
    top = max(top, sink)
    for i in range(num_parts):
        top = max(top, parts[_part_of(i, ranges, rest_ranges) * words + head_dim])
    scales = np.empty(LANES, np.float32)
    store(scales, 0, exp_lanes(fill(F32x16, rest_top - top)))
    total = scales[0]
    for j in range(head_dim):
        out[j] = scales[0] * rest[j]
    for i in range(num_parts):
        at = _part_of(i, ranges, rest_ranges) * words
        total += _add_part(parts[at : at + words], top, out)
    for part in given:
        if len(part) > 0:
            total += _add_part(part, top, out)
    store(scales, 0, exp_lanes(fill(F32x16, sink - top)))
    total += scales[0]
    for j in range(head_dim):
        out[j] /= total
    return 0


@exact_kernel
def _range_rows(list_len: int) -> int:
    longest = -(-list_len // MAX_RANGES)
    rows: int = max(RANGE_ROWS, -(-longest // LANES) * LANES)
    return rows


@exact_kernel
def _score(
    q: NDArray[np.float32],
    rows: NDArray[np.int64],
    like: Any,
    itemsize: int,
    head_dim: int,
    group_size: int,
    scale: float,
    scores: NDArray[np.float32],  # [group_size * len(rows)], written
) -> None:
    room = len(rows)
    for block in range(0, room, LANES):
        for i in range(block + LANES, min(block + 2 * LANES, room)):
            for line in range(0, 2 * head_dim, 64 // itemsize):
                prefetch(array_at(rows[i], 2 * head_dim, like), line)
        score_16(q, rows, block, like, head_dim, group_size, scale, scores, block, room)


@exact_kernel
def _addresses(
    args: Any, row: int, head: int, first: int, count: int, tail_row_bytes: int, rows: NDArray[np.int64]
) -> Any:
    """Write the addresses of rows [first, first + count) of an index head's list to `rows`.

    Returns how many of them, at the start, belong to the context.
    """
    kv_head = head // (word_of(args.num_index_heads, row) // args.num_kv_heads)
    context_len, capacity = word_of(args.context_lens, row), args.tail_capacity
    row_bytes = word_of(args.row_bytes, row)
    context = word_of(args.kv, row) + kv_head * context_len * row_bytes
    tail = args.tails + (word_of(args.tail_ids, row) * args.num_kv_heads + kv_head) * capacity * tail_row_bytes
    sink_end, window_start = word_of(args.sink_ends, row), word_of(args.window_starts, row)
    own = row + args.own_rows
    recent, ids, own_ids = word_of(args.window_starts, own), chosen_of(args, row, head), chosen_of(args, own, head)
    window_at = sink_end + len(ids)
    tail_at = window_at + context_len - window_start
    recent_at = tail_at + len(own_ids)
    for i in range(count):
        at = first + i
        if at < sink_end:
            rows[i] = context + at * row_bytes
        elif at < window_at:
            rows[i] = context + np.int64(ids[at - sink_end]) * row_bytes
        elif at < tail_at:
            rows[i] = context + (window_start + at - window_at) * row_bytes
        elif at < recent_at:
            rows[i] = tail + np.int64(own_ids[at - tail_at]) * tail_row_bytes
        else:
            rows[i] = tail + (recent + at - recent_at) * tail_row_bytes
    return min(max(tail_at - first, 0), count)


@exact_kernel
def _add_part(part: NDArray[np.float32], top: np.float32, out: NDArray[np.float32]) -> Any:
    """Add a part's output to `out`, rescaled to the maximum `top`; return the sum of its weights."""
    head_dim, scales = len(out), np.empty(LANES, np.float32)
    store(scales, 0, exp_lanes(fill(F32x16, part[head_dim] - top)))
    for j in range(head_dim):
        out[j] += scales[0] * part[j]
    return scales[0] * part[head_dim + 1]


@exact_kernel
def _given_rest(args: Any, row: int, q_head: int) -> NDArray[np.float32]:
    """The part for the rest that came with the selection; empty if none did."""
    rests, words = word_of(args.rests, row), args.head_dim + 2
    part: NDArray[np.float32] = array_at(rests + 4 * q_head * words, words if rests != 0 else 0, np.float32(0))
    return part


@exact_kernel
def _part_of(number: int, ranges: int, rest_ranges: int) -> int:
    """The place in `parts` of a part by its number: ranges of the list, then of the context's and the tail's rest."""
    if number < ranges:
        return number
    number -= ranges
    return MAX_RANGES + number if number < rest_ranges else 2 * MAX_RANGES + number - rest_ranges


@exact_kernel
def _rest(args: Any, row: int, q_head: int, out: NDArray[np.float32]) -> Any:
    """Estimate attention to the rows that may be selected and are not; return its log-sum-exp, -inf without moments."""
    moments, num_q_heads, head_dim = word_of(args.moments, row), args.num_q_heads, args.head_dim
    if moments == 0:
        return np.float32(-np.inf)
    head = q_head // (num_q_heads // word_of(args.num_index_heads, row))
    kv_head = q_head // (num_q_heads // args.num_kv_heads)
    words = (2 + 2 * head_dim) * head_dim
    table = array_at(moments + 4 * kv_head * words, words, np.float32(0))
    q = array_at(args.q + 4 * (row * num_q_heads + q_head) * head_dim, head_dim, np.float32(0))
    num_rows = word_of(args.window_starts, row) - word_of(args.sink_ends, row)
    scale = array_at(args.softmax_scale, 1, np.float64(0))[0]
    return np.float32(rest_of_head(q, table, valid_len_of(args, row, head), num_rows, scale, out))
