"""The rest in attention in place: rows between sinks and window (the middle) that are not chosen, by a sketch's codes.

The middle is cut into ranges by its length alone, and each writes a part like those of the rows' lists. The first rows
of a tail, if they have a sketch, are treated the same: they are the middle that element row + own_rows describes.
"""

from typing import Any

import numpy as np

from csattn.attention.in_place_arguments import MAX_PARTS, MAX_RANGES, arguments_at, chosen_of
from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import word_of
from csattn.cpu.jit import exact_kernel
from csattn.search.code_sums import CHUNK_KEYS
from csattn.search.match import widen
from csattn.search.rest import attend_rows
from csattn.search.sketch import project_queries, quantise_queries, sketch_at

RANGE_ROWS = 16384  # ranges are longer if the middle has more than MAX_RANGES of these


def rest_queries_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Project the queries for `rest_stage`. A piece is a KV head of a row: of rows' contexts, then of their tails."""
    args = arguments_at(arguments)
    num_kv_heads = args.num_kv_heads
    row, place = _place_of(args, piece // num_kv_heads)
    head = piece % num_kv_heads
    if word_of(args.sketches, place) != 0:
        group_size, head_dim = args.num_q_heads // num_kv_heads, args.head_dim
        at = (row * num_kv_heads + head) * group_size * head_dim
        q = array_at(args.q + 4 * at, group_size * head_dim, np.float32(0))
        sketch = sketch_at(word_of(args.sketches, place))
        queries = args.queries + (place * num_kv_heads + head) * args.query_bytes
        scale = array_at(args.softmax_scale, 1, np.float64(0))[0]
        project_queries(sketch, head, widen(q), 0, sketch.num_segments, scale, queries)
        quantise_queries(sketch, group_size, queries)
    return 0


def rest_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Attend to one range by codes.

    A piece is a range of a KV head's middle: there are 2 * num_kv_heads * max_rest_ranges for each row of the step.
    """
    args = arguments_at(arguments)
    # neighbouring rows are likely to read the same codes
    num_rows = word_of(args.num_rows, 0)
    row, place = _place_of(args, piece % (2 * num_rows))
    head_range = piece // (2 * num_rows)
    head, number = head_range // args.max_rest_ranges, head_range % args.max_rest_ranges
    if number >= rest_ranges_of(args, place):
        return 0
    sketch, window_start = sketch_at(word_of(args.sketches, place)), word_of(args.window_starts, place)
    range_rows = _range_rows(window_start)
    first, stop = max(number * range_rows, word_of(args.sink_ends, place)), min((number + 1) * range_rows, window_start)
    num_kv_heads, part_words = args.num_kv_heads, args.head_dim + 2
    group_size = args.num_q_heads // num_kv_heads
    queries = args.queries + (place * num_kv_heads + head) * args.query_bytes
    part = (row * args.num_q_heads + head * group_size) * MAX_PARTS + (1 if place == row else 2) * MAX_RANGES + number
    parts, chosen = args.parts + 4 * part * part_words, chosen_of(args, place, head)
    none = np.empty(0, np.uint16)
    attend_rows(sketch, head, queries, group_size, first, stop, chosen, none, 0, parts, MAX_PARTS * part_words)
    return 0


@exact_kernel
def num_rest_ranges(middle_end: int) -> int:
    """The number of ranges that the rows [0, middle_end) are cut into."""
    ranges: int = -(-middle_end // _range_rows(middle_end))
    return ranges


@exact_kernel
def rest_ranges_of(args: Any, place: int) -> Any:
    """The number of ranges of a place's rest (see `_place_of`); 0 if it has no sketch."""
    return num_rest_ranges(word_of(args.window_starts, place)) if word_of(args.sketches, place) != 0 else 0


@exact_kernel
def _place_of(args: Any, number: int) -> tuple[int, int]:
    """The row of a number below 2 * num_rows, and its place: the index in by-row arrays of its context or its tail."""
    num_rows = word_of(args.num_rows, 0)
    row = number % num_rows
    return row, row + (args.own_rows if number >= num_rows else 0)


@exact_kernel
def _range_rows(middle_end: int) -> int:
    longest = -(-middle_end // MAX_RANGES)
    rows: int = max(RANGE_ROWS, -(-longest // CHUNK_KEYS) * CHUNK_KEYS)
    return rows
