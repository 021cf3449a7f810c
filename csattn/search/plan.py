"""What kernels are told of a search, as records that threads share, and how keys are cut into ranges.

A job is one index head of one token. Its keys, the context's and then the tail's, are cut into ranges of range_keys, in
context and tail apart. Ranges depend on the number of keys only: what is summed by range is the same whoever sums it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import record_at
from csattn.cpu.jit import exact_kernel

MAX_PIECES = 64  # of a stage of a job: one bit each in a word
MAX_JOBS = 64  # that are worked on at a time
RANGE_KEYS = 8192  # at least, where there are as many: their scores and powers stay in the L2 cache
STEP_KEYS = 4096  # ranges are multiples of this
SUBSPACES_AT_ONCE = 8  # that a piece of matching takes, where that makes few enough pieces
SEGMENTS_AT_ONCE = 2  # likewise
SAMPLE = 2048  # at least that many keys are looked at for a first guess, fewer than twice as many

SEARCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses of arrays, C-contiguous
            "q",  # [num_tokens, num_heads, group_size, head_dim] float32
            "kv_indices",  # [num_tokens, num_heads, top_k] int32, written
            "valid_len",  # [num_tokens, num_heads] int32, written
            "rest",  # [num_tokens, num_heads, group_size, head_dim + 2] float32, written: parts as of `rest`; 0: none
            # sizes
            "num_tokens",
            "num_heads",
            "group_size",  # queries that one index head answers for
            "head_dim",
            "top_k",
            "context_len",
            "sink_len",
            "window_len",
            "tail_rows",
            "tail_room",
            "first_job",  # job h * num_tokens + t serves head h of token t: neighbours read the same
            "num_jobs",
            "heeds_marks",  # whether marked keys are chosen first
            "num_stages",
            # pieces
            "num_parts",  # that a query is matched with: subspaces or segments
            "match_parts",  # of a piece
            "match_pieces",
            "score_pieces",
            "row_parts",  # pieces of lists that a query row's keys are cut into: part_ranges ranges of the context each
            "part_ranges",
            "range_keys",
            "num_ranges",
            "context_ranges",  # the others are the tail's
            "sample_step",  # every how many keys one is looked at; 1: there are so few that none is
            "sketch",  # address of a SKETCH; 0: what follows is an index of lists
            "codebook_columns",  # [num_heads, num_subspaces, subspace_dim, centroid_room] float32
            "num_subspaces",
            "num_centroids",
            "centroid_room",
            "weigh_by_norm",
            "listed",  # of a `ListTable`, and its other arrays
            "starts",
            "list_scores",
            "list_len",
            "score_room",  # what the scores of a list are filled up to
            "num_inserted",  # of a `ListTail`, and its other arrays
            "inserted_indices",
            "inserted_scores",
            "kept_least",
            "kept_place",
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
            "query_bytes",  # of a job's queries
            "stride",  # from one query row's scores to the next's
            "sample_stride",
            # address of MAX_JOBS blocks of query_bytes. Of a sketch: see `sketch.query_places`. Of lists: [group_size,
            # num_subspaces] int64, the matched centroid, then the number of its list; likewise float64, its weight
            "queries",
            "slots",  # address of num_slots blocks of slot_bytes
            "slot_bytes",
            # where arrays begin in a slot
            "at_copied",  # [stride] int32
            "at_copied_group_scores",  # [stride] int32
            "at_sample",  # [group_size, sample_stride], like scores
            "at_sample_group_scores",  # [sample_stride] int32
            "at_counts",  # [num_ranges] int64: keys that reach the guess
            "at_guess",  # [2] int64: what the copied keys reach, and which rank of the sample that is
            # of sketches
            "at_scores",  # [group_size, stride] uint16, of lists float32
            "at_greatest",  # [group_size, stride / NORMALISER_KEYS] uint16: of `keep_greatest`
            "at_group_shifts",  # [group_size] uint16: of `best_share`
            "at_parts",  # [num_ranges, group_size, head_dim + 2] float32: of the rest, if it is asked for
            # of lists
            "at_shifts",  # [num_ranges, group_size] float64
            "at_totals",  # [num_ranges, group_size] float64
            "at_terms",  # [group_size, 4] float32: of `group_scores_of_shares`
        )
    ]
)


def record(dtype: np.dtype[Any]) -> NDArray[Any]:
    """One record of zeros [1]."""
    return np.zeros(1, dtype)


search_at, scratch_at = record_at(SEARCH), record_at(SCRATCH)


@exact_kernel
def cut_pieces(search: Any) -> None:
    """Fill in what a SEARCH says about pieces, once the other sizes are there."""
    context_len, tail_rows, of_sketch = search.context_len, search.tail_rows, search.sketch != 0
    at_once = SEGMENTS_AT_ONCE if of_sketch else SUBSPACES_AT_ONCE
    search.match_parts = max(at_once, -(-search.num_parts // MAX_PIECES))
    search.match_pieces = -(-search.num_parts // search.match_parts)
    wanted = -(-(context_len + tail_rows) // (MAX_PIECES - 2))
    range_keys = max(RANGE_KEYS, -(-wanted // STEP_KEYS) * STEP_KEYS)
    context_ranges = max(1, -(-context_len // range_keys))
    search.range_keys, search.context_ranges = range_keys, context_ranges
    search.num_ranges = context_ranges + -(-tail_rows // range_keys)
    search.row_parts = min(context_ranges, max(1, MAX_PIECES // search.group_size))
    search.part_ranges = -(-context_ranges // search.row_parts)
    # none is empty: the last chunk clears the tail's room, so its thread has to score the tail, and after it
    search.row_parts = -(-context_ranges // search.part_ranges)
    search.score_pieces = search.num_ranges if of_sketch else search.group_size * search.row_parts
    sampled = context_len + tail_rows > 2 * SAMPLE
    search.sample_step = (context_len + tail_rows) // SAMPLE if sampled else 1


@exact_kernel
def place_of(search: Any, job: int) -> tuple[int, int]:
    """The token and the head that a job serves."""
    head, token = divmod(search.first_job + job, search.num_tokens)
    return token, head


@exact_kernel
def range_of(search: Any, number: int) -> tuple[int, int]:
    """First and one past the last key of a range."""
    if number < search.context_ranges:
        first = number * search.range_keys
        return first, min(first + search.range_keys, search.context_len)
    first = search.context_len + (number - search.context_ranges) * search.range_keys
    return first, min(first + search.range_keys, search.context_len + search.tail_rows)


@exact_kernel
def eligible_of(search: Any, number: int) -> tuple[int, int]:
    """First and one past the last key of a range that may be chosen: neither sink nor window."""
    first, last = range_of(search, number)
    if number < search.context_ranges:
        first = min(max(first, search.sink_len), last)  # its keys are read by whole blocks, also where none is left
        last = max(first, min(last, search.context_len - search.window_len))
    return first, last
