"""What kernels are told of a search, as records that threads share, and how keys are cut into ranges.

A job is one index head of one token. Its keys have positions, which is where their scores lie: the context's keys from
0, the tail's from tail_at on. Positions are cut into ranges of range_keys, in context and tail apart. Ranges depend on
the number of keys only: what is summed by range is the same whoever sums it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype
from numba.extending import intrinsic
from numpy.typing import NDArray

from csattn.jit import exact_kernel

MAX_PIECES = 64  # of a stage of a job: one bit each in a word
MAX_JOBS = 64  # that are worked on at a time
RANGE_KEYS = 8192  # at least, where there are as many: their scores and powers stay in the L2 cache
STEP_KEYS = 4096  # ranges are multiples of this
SUBSPACES_AT_ONCE = 8  # that a piece of matching takes, where that makes few enough pieces
NEXT_IS_KNOWN = 1 << 16  # added to the number of a piece to score: what the next job reads may be fetched already
SAMPLE = 2048  # at least that many keys are looked at for a first guess, fewer than twice as many

SEARCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses of arrays, C-contiguous
            "q",  # [num_tokens, num_heads, pool_size * group_size, head_dim] float32
            "query_basis",  # [num_heads, head_dim, head_dim] float32
            "codebook_columns",  # [num_heads, num_subspaces, subspace_dim, centroid_room] float32
            "kv_indices",  # [num_tokens, num_heads, top_k] int32, written
            "valid_len",  # [num_tokens, num_heads] int32, written
            # sizes
            "num_heads",
            "group_size",  # queries that one index head answers for
            "pool_size",  # query heads that are made one query
            "head_dim",
            "num_subspaces",
            "num_centroids",
            "centroid_room",
            "weigh_by_norm",
            "top_k",
            "context_len",
            "sink_len",
            "window_len",
            "tail_rows",
            "tail_room",
            "first_job",  # job t * num_heads + h serves head h of token t
            "num_jobs",
            # pieces
            "match_subspaces",  # of a piece
            "match_pieces",
            "score_pieces",
            "range_keys",
            "num_ranges",
            "context_ranges",  # the others are the tail's
            "tail_at",
            "sample_step",  # every how many keys one is looked at; 1: there are so few that none is
            # a RowTable
            "codes",
            "code_bytes",
            "row_bytes",
            "row_stride",  # from one row to the next; at least row_bytes
            "score_bits",  # 0: a ListTable
            "scales",
            "tail_codes",  # [num_heads, num_subspaces, num_centroids, tail_room] int8
            # a ListTable
            "list_indices",
            "list_scores",
            "list_len",
            "num_inserted",
            "inserted_indices",
            "inserted_scores",
        )
    ]
    + [("softmax_scale", np.float64)]
)

SCRATCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            "num_threads",
            "num_slots",  # jobs that may be between their scores and their selection at a time
            "row_room",  # num_subspaces, rounded up to what `add_rows4` takes at once
            "stride",  # from one query row's scores to the next's
            "sample_stride",
            # addresses of arrays [MAX_JOBS, group_size, row_room]
            "starts",  # int64: the matched centroid, then the number of its row or list
            "weights",  # float64
            "multipliers",  # int64
            "slopes",  # [MAX_JOBS, group_size] float32
            "slots",  # address of num_slots blocks of slot_bytes
            "slot_bytes",
            # where arrays begin in a slot
            "at_scores",  # [group_size, stride] int16 or float32
            "at_powers",  # [group_size, stride] float32
            "at_copied",  # [stride] int32
            "at_copied_worth",  # [stride] int32
            "at_sample",  # [group_size, sample_stride], like scores
            "at_sample_worth",  # [sample_stride] int32
            "at_counts",  # [num_ranges] int64: keys that reach the guess
            "at_exact",  # [num_ranges] int64: whether powers do not serve
            "at_shifts",  # [num_ranges, group_size] float64
            "at_totals",  # [num_ranges, group_size] float64
            "at_lowest",  # [num_ranges, group_size] float64
            "at_factors",  # [num_ranges, group_size] float32
            "at_terms",  # [group_size, 4] float32: of `worth_of_shares`
            "at_guess",  # [2] int64: what the copied keys reach, and which rank of the sample that is
        )
    ]
)


def record(dtype: np.dtype[Any]) -> NDArray[Any]:
    """One record of zeros [1]."""
    return np.zeros(1, dtype)


@intrinsic
def search_at(typing_context, address):  # type: ignore[no-untyped-def]
    """The SEARCH at an address."""
    return from_dtype(SEARCH)(address), _to_record


@intrinsic
def scratch_at(typing_context, address):  # type: ignore[no-untyped-def]
    """The SCRATCH at an address."""
    return from_dtype(SCRATCH)(address), _to_record


def _to_record(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(sig.return_type))


@exact_kernel
def cut_pieces(search: Any) -> None:
    """Fill in what a SEARCH says about pieces, once the other sizes are there."""
    context_len, tail_rows = search.context_len, search.tail_rows
    search.match_subspaces = max(SUBSPACES_AT_ONCE, -(-search.num_subspaces // MAX_PIECES))
    search.match_pieces = -(-search.num_subspaces // search.match_subspaces)
    wanted = -(-(context_len + tail_rows) // (MAX_PIECES - 2))
    range_keys = max(RANGE_KEYS, -(-wanted // STEP_KEYS) * STEP_KEYS)
    context_ranges = max(1, -(-context_len // range_keys))
    search.range_keys, search.context_ranges = range_keys, context_ranges
    search.num_ranges = context_ranges + -(-tail_rows // range_keys)
    of_rows = search.score_bits > 0
    search.score_pieces = search.num_ranges if of_rows else search.group_size
    # whole steps of rows are written behind the context
    search.tail_at = -(-context_len // 128) * 128 if of_rows else context_len
    sampled = context_len + tail_rows > 2 * SAMPLE
    search.sample_step = (context_len + tail_rows) // SAMPLE if sampled else 1


@exact_kernel
def range_of(search: Any, number: int) -> tuple[int, int]:
    """First and one past the last position of a range."""
    if number < search.context_ranges:
        first = number * search.range_keys
        return first, min(first + search.range_keys, search.context_len)
    first = (number - search.context_ranges) * search.range_keys
    return search.tail_at + first, search.tail_at + min(first + search.range_keys, search.tail_rows)


@exact_kernel
def eligible_of(search: Any, number: int) -> tuple[int, int]:
    """First and one past the last position of a range that may be chosen: neither sink nor window."""
    first, last = range_of(search, number)
    if number < search.context_ranges:
        first = max(first, search.sink_len)
        last = max(first, min(last, search.context_len - search.window_len))
    return first, last
