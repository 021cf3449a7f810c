"""Attention of a step's rows on the CPU, over context rows where they lie and a request's own: nothing is gathered.

The rows that a head attends to stand in one list: sinks, selected rows, window, tail. The list is cut into ranges by
its length alone, each range is attended to as a piece of its own, and the ranges are merged in their order. So a row's
result depends neither on the rows beside it nor on threads. Definition: `in_place_reference`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.attention.coded_rows import mix_coded, score_coded
from csattn.attention.row_math import mix, score_16, weigh
from csattn.cpu.floats import LANES, exp_lanes
from csattn.cpu.stages import Stage
from csattn.jit import exact_kernel
from csattn.rest.estimate import rest_of_head
from csattn.search.atomics import array_at
from csattn.search.simd import F32x16, fill, prefetch, store

RANGE_ROWS = 256
MAX_RANGES = 16  # where the list is longer, ranges are

# arguments: addresses, and sizes. What is "by row" is an int64 array with an element for each row of the step.
ARGUMENTS = (
    "num_rows",  # address of the number of rows
    "q",  # [num_rows, num_q_heads, head_dim] float32
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "softmax_scale",  # address of a float64
    "kv",  # by row: the context's KV in this layer, [num_kv_heads, context_len] rows
    "row_bytes",  # by row: of a row of the context
    "v_offsets",  # by row: bytes from where a row of the context begins to its value
    "k_readers",  # by row: see `coded_rows`; 0: the context's rows are [2, head_dim] of the stage's dtype
    "v_readers",  # by row
    "context_lens",  # by row
    "sink_ends",  # by row: rows [0, sink_end) of the context are attended to,
    "window_starts",  # by row: and rows [window_start, context_len)
    "num_index_heads",  # by row
    "top_ks",  # by row
    "kv_indices",  # by row: [num_index_heads, top_k] int32
    "valid_lens",  # by row: [num_index_heads] int32; address 0: nothing is selected
    "moments",  # by row: `rest.Moments` of the rows that may be selected; address 0: those that are not count nothing
    "tails",  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
    "tail_capacity",
    "tail_ids",  # by row
    "tail_lens",  # by row, at least 1
    "max_index_heads",  # of all rows
    "max_ranges",  # of all rows' lists
    "parts",  # [num_rows, num_q_heads, MAX_RANGES, head_dim + 2] float32
    "out",  # [num_rows, num_q_heads * head_dim] float32
)
(
    _NUM_ROWS, _Q, _NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _SCALE, _KV, _ROW_BYTES, _V_OFFSETS, _K_READERS, _V_READERS,
    _CONTEXT_LENS, _SINK_ENDS, _WINDOW_STARTS, _NUM_INDEX_HEADS, _TOP_KS, _KV_INDICES, _VALID_LENS, _MOMENTS,
    _TAILS, _TAIL_CAPACITY, _TAIL_IDS, _TAIL_LENS, _MAX_INDEX_HEADS, _MAX_RANGES, _PARTS, _OUT,
) = range(len(ARGUMENTS))  # fmt: skip
_NUM_ARGUMENTS = len(ARGUMENTS)


def num_ranges(list_len: int) -> int:
    """How many ranges a list of that many rows is cut into."""
    ranges: int = -(-list_len // _range_rows(list_len))
    return ranges


def attend_stage(kind: str) -> Stage:
    """For KV of that dtype. A piece is a range of one index head's list: max_index_heads * max_ranges a row."""
    return _STAGES[kind]


def merge_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Merge the ranges of what `attend_stage` has left in `parts`. A piece is a query head of a row."""
    args = array_at(arguments, _NUM_ARGUMENTS, np.int64(0))
    _merge(args, piece // args[_NUM_Q_HEADS], piece % args[_NUM_Q_HEADS])
    return 0


def _attend_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM_ARGUMENTS, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _attend_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM_ARGUMENTS, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _attend_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM_ARGUMENTS, np.int64(0)), piece, np.int16(0), 2)
    return 0


_STAGES: dict[str, Stage] = {
    "float32": _attend_float32,
    "bfloat16": _attend_bfloat16,
    "float16": _attend_float16,
}


@exact_kernel
def _range_rows(list_len: int) -> int:
    longest = -(-list_len // MAX_RANGES)
    rows: int = max(RANGE_ROWS, -(-longest // LANES) * LANES)
    return rows


@exact_kernel
def _attend(args: NDArray[np.int64], piece: int, like: Any, itemsize: int) -> None:
    # rows that follow each other are likely to read the same of one head: its window, and what many choose
    num_rows = array_at(args[_NUM_ROWS], 1, np.int64(0))[0]
    row, head_range = piece % num_rows, piece // num_rows
    head, number = head_range // args[_MAX_RANGES], head_range % args[_MAX_RANGES]
    num_index_heads = _of_row(args, _NUM_INDEX_HEADS, row)
    if head >= num_index_heads:
        return
    list_len = _list_len(args, row, head)
    range_rows = _range_rows(list_len)
    first, last = number * range_rows, min((number + 1) * range_rows, list_len)
    if first >= last:
        return
    num_q_heads, head_dim = args[_NUM_Q_HEADS], args[_HEAD_DIM]
    group_size = num_q_heads // num_index_heads
    count = last - first
    room = -(-count // LANES) * LANES
    rows = np.empty(room, np.int64)
    num_context = _addresses(args, row, head, first, count, 2 * head_dim * itemsize, rows)
    for i in range(count, room):
        rows[i] = rows[count - 1]  # a row that is there; its weight will be 0
    if num_context == count:
        num_context = room
    coded = _of_row(args, _K_READERS, row) != 0
    q = array_at(
        args[_Q] + 4 * (row * num_q_heads + head * group_size) * head_dim, group_size * head_dim, np.float32(0)
    )
    scale = array_at(args[_SCALE], 1, np.float64(0))[0]
    weights = np.empty(group_size * room, np.float32)
    if coded:
        reader, row_bytes = _of_row(args, _K_READERS, row), _of_row(args, _ROW_BYTES, row)
        score_coded(q, rows, num_context, reader, row_bytes, like, head_dim, group_size, scale, weights)
    else:
        _score(q, rows, like, itemsize, head_dim, group_size, scale, weights)
    part_words = head_dim + 2
    parts = args[_PARTS] + 4 * ((row * num_q_heads + head * group_size) * MAX_RANGES + number) * part_words
    for g in range(group_size):
        part = array_at(parts + 4 * g * MAX_RANGES * part_words, part_words, np.float32(0))
        weigh(weights, g * room, count, room, part, head_dim)
        part[:head_dim] = 0.0
        if not coded:
            mix(weights, g * room, rows, 0, room, head_dim, like, head_dim, part)
    if coded:
        reader, offset = _of_row(args, _V_READERS, row), _of_row(args, _V_OFFSETS, row)
        part_bytes = 4 * MAX_RANGES * part_words
        mix_coded(weights, rows, num_context, reader, offset, like, itemsize, head_dim, group_size, parts, part_bytes)


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
def _of_row(args: NDArray[np.int64], what: int, row: int) -> Any:
    return array_at(args[what] + 8 * row, 1, np.int64(0))[0]


@exact_kernel
def _valid_len(args: NDArray[np.int64], row: int, head: int) -> Any:
    address = _of_row(args, _VALID_LENS, row)
    if address == 0:
        return np.int64(0)
    return np.int64(array_at(address + 4 * head, 1, np.int32(0))[0])


@exact_kernel
def _list_len(args: NDArray[np.int64], row: int, head: int) -> Any:
    window_len = _of_row(args, _CONTEXT_LENS, row) - _of_row(args, _WINDOW_STARTS, row)
    near = _of_row(args, _SINK_ENDS, row) + window_len + _of_row(args, _TAIL_LENS, row)
    return near + _valid_len(args, row, head)


@exact_kernel
def _addresses(
    args: NDArray[np.int64], row: int, head: int, first: int, count: int, tail_row_bytes: int, rows: NDArray[np.int64]
) -> Any:
    """Where rows [first, first + count) of an index head's list lie; how many of them, the first, are the context's."""
    kv_head = head // (_of_row(args, _NUM_INDEX_HEADS, row) // args[_NUM_KV_HEADS])
    context_len, capacity = _of_row(args, _CONTEXT_LENS, row), args[_TAIL_CAPACITY]
    row_bytes = _of_row(args, _ROW_BYTES, row)
    context = _of_row(args, _KV, row) + kv_head * context_len * row_bytes
    tail = args[_TAILS] + (_of_row(args, _TAIL_IDS, row) * args[_NUM_KV_HEADS] + kv_head) * capacity * tail_row_bytes
    sink_end, window_start = _of_row(args, _SINK_ENDS, row), _of_row(args, _WINDOW_STARTS, row)
    valid = _valid_len(args, row, head)
    window_at, tail_at = sink_end + valid, sink_end + valid + context_len - window_start
    ids = array_at(_of_row(args, _KV_INDICES, row) + 4 * head * _of_row(args, _TOP_KS, row), valid, np.int32(0))
    for i in range(count):
        at = first + i
        if at < sink_end:
            rows[i] = context + at * row_bytes
        elif at < window_at:
            rows[i] = context + np.int64(ids[at - sink_end]) * row_bytes
        elif at < tail_at:
            rows[i] = context + (window_start + at - window_at) * row_bytes
        else:
            rows[i] = tail + (at - tail_at) * tail_row_bytes
    return min(max(tail_at - first, 0), count)


@exact_kernel
def _merge(args: NDArray[np.int64], row: int, q_head: int) -> None:
    num_q_heads, head_dim = args[_NUM_Q_HEADS], args[_HEAD_DIM]
    head = q_head // (num_q_heads // _of_row(args, _NUM_INDEX_HEADS, row))
    list_len = _list_len(args, row, head)
    ranges, words = -(-list_len // _range_rows(list_len)), head_dim + 2
    place = (row * num_q_heads + q_head) * MAX_RANGES * words
    parts = array_at(args[_PARTS] + 4 * place, ranges * words, np.float32(0))
    out = array_at(args[_OUT] + 4 * (row * num_q_heads + q_head) * head_dim, head_dim, np.float32(0))
    rest = np.zeros(head_dim, np.float32)
    top = rest_top = _rest(args, row, q_head, rest)
    for i in range(ranges):
        top = max(top, parts[i * words + head_dim])
    scales = np.empty(LANES, np.float32)
    store(scales, 0, exp_lanes(fill(F32x16, rest_top - top)))
    total = scales[0]
    for j in range(head_dim):
        out[j] = scales[0] * rest[j]
    for i in range(ranges):
        store(scales, 0, exp_lanes(fill(F32x16, parts[i * words + head_dim] - top)))
        total += scales[0] * parts[i * words + head_dim + 1]
        for j in range(head_dim):
            out[j] += scales[0] * parts[i * words + j]
    for j in range(head_dim):
        out[j] /= total


@exact_kernel
def _rest(args: NDArray[np.int64], row: int, q_head: int, out: NDArray[np.float32]) -> Any:
    """An estimate of attention to the rows that could be selected and are not, and its log-sum-exp; -inf: none."""
    moments, num_q_heads, head_dim = _of_row(args, _MOMENTS, row), args[_NUM_Q_HEADS], args[_HEAD_DIM]
    if moments == 0:
        return np.float32(-np.inf)
    head = q_head // (num_q_heads // _of_row(args, _NUM_INDEX_HEADS, row))
    kv_head = q_head // (num_q_heads // args[_NUM_KV_HEADS])
    words = (2 + 2 * head_dim) * head_dim
    table = array_at(moments + 4 * kv_head * words, words, np.float32(0))
    q = array_at(args[_Q] + 4 * (row * num_q_heads + q_head) * head_dim, head_dim, np.float32(0))
    num_rows = _of_row(args, _WINDOW_STARTS, row) - _of_row(args, _SINK_ENDS, row)
    scale = array_at(args[_SCALE], 1, np.float64(0))[0]
    return np.float32(rest_of_head(q, table, _valid_len(args, row, head), num_rows, scale, out))
