"""The compiled search: one job is one index head of one token, from its query rows to its chosen kv indices."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lists import KEYS_PER_STEP, add_list, clear_scores
from csattn.search.match import match_centroids
from csattn.search.rows import STEP_BYTES, SUM_BYTES, add_rows4, add_rows8
from csattn.search.select import select_top_k
from csattn.search.weights import integer_weights
from csattn.search.worth import LOG2_E, NO_SHIFT, NOT_SCORED, add_powers, combine_group, worth_of_scores


@exact_kernel
def search_rows(
    first_job: int,
    last_job: int,
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    query_basis: NDArray[np.float32],
    codebooks: NDArray[np.float32],
    weigh_by_norm: bool,
    codes: NDArray[np.uint8],  # flat
    scales: NDArray[np.float32],
    score_bits: int,
    tail_codes: NDArray[np.uint8],  # flat [num_heads, num_subspaces, num_centroids, tail_room], bytes are int8
    tail_room: int,
    shape: tuple[int, int, int, int],  # context_len, tail_rows, sink_len, window_len
    softmax_scale: float,
    scores: NDArray[np.int16],  # scratch [group_size * stride], as the next three
    stride: int,
    worth: NDArray[np.int32],
    copied: NDArray[np.int32],
    copied_worth: NDArray[np.int32],
    kv_indices: NDArray[np.int32],  # [num_tokens, num_heads, top_k], written
    valid_len: NDArray[np.int32],  # [num_tokens, num_heads], written
) -> None:
    """Jobs [first_job, last_job) over a RowTable; job t * num_heads + h serves head h of token t."""
    num_heads, num_subspaces, num_centroids, _ = codebooks.shape
    group_size = q.shape[1] // num_heads
    context_len, tail_rows, _, _ = shape
    largest_code = 127 if score_bits == 8 else 7
    row_bytes = len(codes) // (num_heads * num_subspaces * num_centroids)
    rotated = np.empty(q.shape[2], np.float64)
    centroid_ids, starts = np.empty(num_subspaces, np.int64), np.empty(num_subspaces, np.int64)
    weights = np.empty(num_subspaces, np.float64)
    slopes = np.empty(group_size, np.float32)
    shifts, totals = np.empty(group_size, np.float64), np.empty(group_size, np.float64)
    sums = np.empty(SUM_BYTES // 2, np.uint16)
    edge = np.empty(num_subspaces * STEP_BYTES, np.uint8)
    for job in range(first_job, last_job):
        token, head = divmod(job, num_heads)
        for row in range(group_size):
            match_centroids(
                q[token, head * group_size + row],
                query_basis[head],
                codebooks[head],
                weigh_by_norm,
                rotated,
                centroid_ids,
                weights,
            )
            for b in range(num_subspaces):
                starts[b] = (head * num_subspaces + b) * num_centroids + centroid_ids[b]
                weights[b] *= scales[head, b, centroid_ids[b]]
            unit, multipliers = integer_weights(weights, largest_code)
            slopes[row] = softmax_scale * unit * LOG2_E
            at = row * stride
            if score_bits == 8:
                add_rows8(codes, starts * row_bytes, multipliers, row_bytes, scores, at)
            else:
                whole = row_bytes - row_bytes % STEP_BYTES
                add_rows4(codes, starts * row_bytes, multipliers, whole, scores, at, sums)
                if whole < row_bytes:
                    # half a step is left: add it from a copy, so that nothing is read beyond the last row
                    for b in range(num_subspaces):
                        for i in range(row_bytes - whole):
                            edge[b * STEP_BYTES + i] = codes[starts[b] * row_bytes + whole + i]
                    edge_starts = np.arange(num_subspaces) * STEP_BYTES
                    add_rows4(edge, edge_starts, multipliers, STEP_BYTES, scores, at + 2 * whole, sums)
            # the tail's scores follow the context's, over the scores of the padding
            tail_bytes = -(-tail_rows // STEP_BYTES) * STEP_BYTES
            add_rows8(tail_codes, starts * tail_room, multipliers, tail_bytes, scores, at + context_len)
            if group_size > 1:
                shifts[row], totals[row] = add_powers(scores, at, context_len + tail_rows, slopes[row], NO_SHIFT, 0.0)
        valid_len[token, head] = choose(
            scores, stride, slopes, shifts, totals, shape, worth, copied, copied_worth, kv_indices[token, head]
        )


@exact_kernel
def search_lists(
    first_job: int,
    last_job: int,
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    query_basis: NDArray[np.float32],
    codebooks: NDArray[np.float32],
    weigh_by_norm: bool,
    indices: NDArray[np.int32],  # flat [num_heads, num_subspaces, num_centroids, list_len]
    halves: NDArray[np.uint16],  # flat, float16 bits
    num_inserted: NDArray[np.int32],  # flat [num_heads, num_subspaces, num_centroids], or empty without a tail
    inserted_indices: NDArray[np.int32],  # flat [num_heads, num_subspaces, num_centroids, tail_room]
    inserted_scores: NDArray[np.float32],  # as many
    shape: tuple[int, int, int, int],  # context_len, tail_rows, sink_len, window_len
    softmax_scale: float,
    scores: NDArray[np.float32],  # scratch [group_size * stride], as the next three
    stride: int,
    worth: NDArray[np.int32],
    copied: NDArray[np.int32],
    copied_worth: NDArray[np.int32],
    kv_indices: NDArray[np.int32],  # [num_tokens, num_heads, top_k], written
    valid_len: NDArray[np.int32],  # [num_tokens, num_heads], written
) -> None:
    """Jobs [first_job, last_job) over a ListTable; job t * num_heads + h serves head h of token t."""
    num_heads, num_subspaces, num_centroids, _ = codebooks.shape
    group_size = q.shape[1] // num_heads
    num_lists = num_heads * num_subspaces * num_centroids
    list_len = len(indices) // num_lists
    tail_room = len(inserted_indices) // num_lists
    num_keys = shape[0] + shape[1]
    rotated = np.empty(q.shape[2], np.float64)
    centroid_ids, weights = np.empty(num_subspaces, np.int64), np.empty(num_subspaces, np.float64)
    slopes = np.full(group_size, np.float32(softmax_scale * LOG2_E), np.float32)
    shifts, totals = np.empty(group_size, np.float64), np.empty(group_size, np.float64)
    step = np.empty(KEYS_PER_STEP, np.float32)
    for job in range(first_job, last_job):
        token, head = divmod(job, num_heads)
        for row in range(group_size):
            match_centroids(
                q[token, head * group_size + row],
                query_basis[head],
                codebooks[head],
                weigh_by_norm,
                rotated,
                centroid_ids,
                weights,
            )
            clear_scores(scores, row * stride, num_keys)
            for b in range(num_subspaces):
                number = (head * num_subspaces + b) * num_centroids + centroid_ids[b]
                inserted = np.int64(num_inserted[number]) if tail_room > 0 else 0
                kept = list_len - inserted
                add_list(scores, row * stride, indices, halves, number * list_len, kept, weights[b], step)
                weight = np.float32(weights[b])
                for i in range(number * tail_room, number * tail_room + inserted):
                    scores[row * stride + inserted_indices[i]] += weight * inserted_scores[i] + np.float32(0)
            if group_size > 1:
                shifts[row], totals[row] = add_powers(scores, row * stride, num_keys, slopes[row], NO_SHIFT, 0.0)
        valid_len[token, head] = choose(
            scores, stride, slopes, shifts, totals, shape, worth, copied, copied_worth, kv_indices[token, head]
        )


@exact_kernel
def choose(
    scores: NDArray[Any],  # [group_size * stride] int16 or float32
    stride: int,
    slopes: NDArray[np.float32],  # [group_size], as the next two: see `worth`
    shifts: NDArray[np.float64],
    totals: NDArray[np.float64],
    shape: tuple[int, int, int, int],  # context_len, tail_rows, sink_len, window_len
    worth: NDArray[np.int32],
    copied: NDArray[np.int32],
    copied_worth: NDArray[np.int32],
    chosen: NDArray[np.int32],  # [top_k], written
) -> int:
    """Combine the group's scores, put the resident rows out of reach, select."""
    context_len, tail_rows, sink_len, window_len = shape
    num_keys = context_len + tail_rows
    if len(slopes) == 1:
        worth_of_scores(scores, num_keys, worth)
    else:
        combine_group(scores, stride, num_keys, slopes, shifts, totals, worth)
    for key in range(min(sink_len, context_len)):
        worth[key] = NOT_SCORED
    for key in range(max(0, context_len - window_len), context_len):
        worth[key] = NOT_SCORED
    num_chosen: int = select_top_k(worth, num_keys, copied, copied_worth, chosen)
    return num_chosen
