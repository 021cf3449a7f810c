"""The arguments of attention in place: int64 words with addresses and sizes."""

from typing import Any

import numpy as np

from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import word_of, words_at
from csattn.cpu.jit import exact_kernel

MAX_RANGES = 16  # of a row's list, and of each of its two rests (the context's and the tail's)
MAX_PARTS = 3 * MAX_RANGES

# "By row": the address of an int64 array with an element for each row of the step. The first rows of a tail may have
# their own sketch and be chosen from like a context's. "By row and own": element row + own_rows describes these.
ARGUMENTS = (
    "num_rows",  # address of the number of rows
    "own_rows",  # the most rows of a step: elements "by own" begin there
    "q",  # [num_rows, num_q_heads, head_dim] float32
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "softmax_scale",  # address of a float64
    "logit_cap",  # address of a float64: logits are cap * tanh(logit / cap); or 0
    "sinks",  # [num_q_heads] float32: the sink logit of each head, which has no row; or 0
    "kv",  # by row: the context's KV in this layer, [num_kv_heads, context_len] rows
    "row_bytes",  # by row: bytes of a row of the context
    "v_offsets",  # by row: bytes from the start of a row of the context to its value
    "k_readers",  # by row: see `coded_rows`; 0: the context's rows are [2, head_dim] of the stage's dtype
    "v_readers",  # by row
    "context_lens",  # by row
    "sink_ends",  # by row: rows [0, sink_end) of the context are attended to,
    "window_starts",  # by row and own: and so are rows [window_start, context_len), or those to the tail's end
    "num_index_heads",  # by row; 0: the row is attended to elsewhere, and its place in `out` is not written
    "top_ks",  # by row and own
    "kv_indices",  # by row and own: [num_index_heads, top_k] int32
    "valid_lens",  # by row and own: [num_index_heads] int32; address 0: nothing is selected
    "moments",  # by row: `rest.Moments` of the rows that may be selected; address 0: the rest is not estimated
    "sketches",  # by row and own: `sketch.SKETCH`; address 0: rows that are not selected are not attended to by codes
    # by row and own: [num_q_heads, head_dim + 2] float32, parts for the rest from `csattn.search.rest`; 0: none
    "rests",
    "queries",  # [2 * own_rows, num_kv_heads] blocks of query_bytes each: projected queries
    "query_bytes",
    "max_rest_ranges",  # the largest number of ranges of a row's rest
    "tails",  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
    "tail_capacity",
    "tail_ids",  # by row
    "tail_lens",  # by row, at least 1
    "max_index_heads",  # the largest number of index heads of a row
    "max_ranges",  # the largest number of ranges of a row's list
    "parts",  # [num_rows, num_q_heads, MAX_PARTS, head_dim + 2] float32
    "out",  # [num_rows, num_q_heads * head_dim] float32
)
arguments_at = words_at(ARGUMENTS)


@exact_kernel
def valid_len_of(args: Any, row: int, head: int) -> Any:
    address = word_of(args.valid_lens, row)
    if address == 0:
        return np.int64(0)
    return np.int64(array_at(address + 4 * head, 1, np.int32(0))[0])


@exact_kernel
def chosen_of(args: Any, row: int, head: int) -> Any:
    address = word_of(args.kv_indices, row) + 4 * head * word_of(args.top_ks, row)
    return array_at(address, valid_len_of(args, row, head), np.int32(0))


@exact_kernel
def list_len_of(args: Any, row: int, head: int) -> Any:
    own = row + args.own_rows
    window_len = word_of(args.context_lens, row) - word_of(args.window_starts, row)
    recent = word_of(args.tail_lens, row) - word_of(args.window_starts, own)
    chosen = valid_len_of(args, row, head) + valid_len_of(args, own, head)
    return word_of(args.sink_ends, row) + window_len + recent + chosen
