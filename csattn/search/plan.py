"""The records that describe a search to the kernels of all threads, and how keys are cut into ranges.

A job is one index head of one token. Its keys, the context's and then the tail's, are cut into ranges of range_keys,
none of which has keys of both. They depend only on the number of keys, so sums by range do not depend on the threads.
"""

from typing import Any

import numpy as np

from csattn.cpu.addresses import record_at
from csattn.cpu.jit import exact_kernel

MAX_PIECES = 64  # of a job's stage: one bit each in a word
MAX_JOBS = 64  # in progress at a time
RANGE_KEYS = 8192  # least size of a range, if there are as many keys: their scores and powers stay in the L2 cache
STEP_KEYS = 4096  # ranges are multiples of this
SUBSPACES_AT_ONCE = 8  # in a piece of the match stage: more only if there would be more than MAX_PIECES pieces
SEGMENTS_AT_ONCE = 2  # the same over a sketch
SAMPLE = 2048  # keys sampled for the first guess: at least so many, fewer than twice as many

_SEARCH_WORDS = (
    # addresses of arrays, C-contiguous
    "q",  # [num_tokens, num_heads, group_size, head_dim] float32
    "kv_indices",  # [num_tokens, num_heads, top_k] int32, written
    "valid_len",  # [num_tokens, num_heads] int32, written
    "rest",  # [num_tokens, num_heads, group_size, head_dim + 2] float32, written: see `search.rest`; 0: none
    # sizes
    "num_tokens",
    "num_heads",
    "group_size",  # query heads that share an index head
    "head_dim",
    "top_k",
    "context_len",
    "sink_len",
    "window_len",
    "tail_rows",
    "tail_room",
    "first_job",  # job h * num_tokens + t serves head h of token t: neighbouring jobs read the same index
    "num_jobs",
    "uses_marks",  # whether marked keys are chosen first
    "num_stages",
    # pieces
    "num_parts",  # of the index: subspaces, or segments of a sketch
    "match_parts",  # of these, in a piece of the match stage
    "match_pieces",
    "score_pieces",
    "row_parts",  # over lists: score pieces of a query row, with part_ranges ranges of the context each
    "part_ranges",
    "range_keys",
    "num_ranges",
    "context_ranges",  # the others are the tail's
    "sample_step",  # one of so many keys is sampled; 1: the keys are few, and none is sampled
    "sketch",  # address of a SKETCH; 0: the index is lists, which the fields from here on describe
    "codebook_columns",  # [num_heads, num_subspaces, subspace_dim, centroid_room] float32
    "num_subspaces",
    "num_centroids",
    "centroid_room",
    "weigh_by_norm",
    "listed",  # addresses of a `ListTable`'s arrays: listed, starts, scores
    "starts",
    "list_scores",
    "list_len",
    "score_room",  # length of a list's scores with padding
    "num_inserted",  # addresses of a `ListTail`'s arrays, from here on
    "inserted_indices",
    "inserted_scores",
    "kept_least",
    "kept_position",
)
SEARCH = np.dtype([*((name, np.int64) for name in _SEARCH_WORDS), ("softmax_scale", np.float64)])

_SCRATCH_WORDS = (
    "num_threads",
    "num_slots",  # jobs that may be between scoring and selection at the same time
    "query_bytes",  # of a job's queries
    "stride",  # elements from one query row's scores to the next's
    "sample_stride",
    # address of MAX_JOBS blocks of query_bytes. Over a sketch: see `sketch.query_places`. Over lists:
    # [group_size, num_subspaces] int64, the nearest centroid, later the number of its list; then its weight,
    # float64 in the same shape
    "queries",
    "slots",  # address of num_slots blocks of slot_bytes
    "slot_bytes",
    # byte offsets of arrays in a slot
    "at_copied",  # [stride] int32: keys that reach the guess
    "at_copied_group_scores",  # [stride] int32
    "at_sample",  # [group_size, sample_stride], of the scores' dtype
    "at_sample_group_scores",  # [sample_stride] int32
    "at_counts",  # [num_ranges] int64: how many keys reach the guess
    "at_guess",  # [2] int64: the guess, a threshold of group scores, and its rank in the sample
    "at_scores",  # [group_size, stride]: uint16 over sketches, float32 over lists
    # sketches only
    "at_greatest",  # [group_size, stride / NORMALISER_KEYS] uint16: see `write_maxima_of_eights`
    "at_group_shifts",  # [group_size] uint16: see `best_share`
    "at_parts",  # [num_ranges, group_size, head_dim + 2] float32: parts of the rest, if it is wanted
    # lists only
    "at_shifts",  # [num_ranges, group_size] float64
    "at_totals",  # [num_ranges, group_size] float64
    "at_terms",  # [group_size, 4] float32: see `share_terms`
)
SCRATCH = np.dtype([(name, np.int64) for name in _SCRATCH_WORDS])


search_at, scratch_at = record_at(SEARCH), record_at(SCRATCH)


@exact_kernel
def cut_pieces(search: Any) -> None:
    """Fill in the fields of a SEARCH about pieces and ranges; the other sizes must be set."""
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
    # No piece is empty: clearing the context's last chunk also clears scores of the tail, so the piece with this chunk
    # must be the one that scores the tail, afterwards.
    search.row_parts = -(-context_ranges // search.part_ranges)
    search.score_pieces = search.num_ranges if of_sketch else search.group_size * search.row_parts
    sampled = context_len + tail_rows > 2 * SAMPLE
    search.sample_step = (context_len + tail_rows) // SAMPLE if sampled else 1


@exact_kernel
def place_of(search: Any, job: int) -> tuple[int, int]:
    """Return the token and the head that a job serves."""
    head, token = divmod(search.first_job + job, search.num_tokens)
    return token, head


@exact_kernel
def range_of(search: Any, number: int) -> tuple[int, int]:
    """Return the first and one past the last key of a range."""
    if number < search.context_ranges:
        first = number * search.range_keys
        return first, min(first + search.range_keys, search.context_len)
    first = search.context_len + (number - search.context_ranges) * search.range_keys
    return first, min(first + search.range_keys, search.context_len + search.tail_rows)


@exact_kernel
def eligible_of(search: Any, number: int) -> tuple[int, int]:
    """Return the first and one past the last key of a range that may be chosen: neither sinks nor window."""
    first, last = range_of(search, number)
    if number < search.context_ranges:
        first = min(max(first, search.sink_len), last)  # kernels read whole blocks from here, even if no key is left
        last = max(first, min(last, search.context_len - search.window_len))
    return first, last
