"""The first half of a job: match its queries, score its keys and turn scores into powers, piece by piece."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.atomics import array_at
from csattn.search.lists import KEYS_PER_STEP, add_list, clear_scores
from csattn.search.match import fetch_columns, match_centroids, pool_queries, rotate, widen
from csattn.search.plan import NEXT_IS_KNOWN, eligible_of, range_of, scratch_at, search_at
from csattn.search.rows import STEP_BYTES, add_rows4, add_rows8
from csattn.search.weights import integer_weights
from csattn.search.worth import LOG2_E, keep_powers


def match_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: find the group's centroids in some subspaces."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    token, head = divmod(search.first_job + job, search.num_heads)
    head_dim, group_size, num_centroids = search.head_dim, search.group_size, search.num_centroids
    subspace_dim, room = head_dim // search.num_subspaces, scratch.row_room
    first = piece * search.match_subspaces
    last = min(first + search.match_subspaces, search.num_subspaces)
    basis = array_at(search.query_basis + 4 * head * head_dim * head_dim, head_dim * head_dim, np.float32(0))
    fetch_columns(basis, head_dim, first * subspace_dim, last * subspace_dim)
    group = search.pool_size * group_size * head_dim
    q = widen(array_at(search.q + 4 * (token * search.num_heads + head) * group, group, np.float32(0)))
    if search.pool_size > 1:
        q = pool_queries(q, head_dim)
    of_subspace = subspace_dim * search.centroid_room
    place = (head * search.num_subspaces + first) * of_subspace
    columns = array_at(search.codebook_columns + 4 * place, (last - first) * of_subspace, np.float32(0))
    centroid_ids = array_at(scratch.starts + 8 * job * group_size * room, group_size * room, np.int64(0))
    weights = array_at(scratch.weights + 8 * job * group_size * room, group_size * room, np.float64(0))
    rotated = rotate(q, basis, head_dim, first * subspace_dim, last * subspace_dim)
    by_norm = search.weigh_by_norm != 0
    match_centroids(rotated, columns, first, last, num_centroids, subspace_dim, by_norm, centroid_ids, weights, room)
    return 0


def weigh_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: from centroids to the numbers of their rows or lists, and from weights to what multiplies scores."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    head, num_subspaces = (search.first_job + job) % search.num_heads, search.num_subspaces
    room, size = scratch.row_room, search.group_size * scratch.row_room
    starts = array_at(scratch.starts + 8 * job * size, size, np.int64(0))
    weights = array_at(scratch.weights + 8 * job * size, size, np.float64(0))
    multipliers = array_at(scratch.multipliers + 8 * job * size, size, np.int64(0))
    slopes = array_at(scratch.slopes + 4 * job * search.group_size, search.group_size, np.float32(0))
    num_rows = search.num_heads * num_subspaces * search.num_centroids
    scales = array_at(search.scales, num_rows if search.score_bits > 0 else 0, np.float32(0))
    used = np.empty(num_subspaces, np.float64)
    for row in range(search.group_size):
        sound = True
        for b in range(room):
            i = row * room + b
            multipliers[i] = 0
            if b >= num_subspaces:
                starts[i] = 0
                continue
            starts[i] += (head * num_subspaces + b) * search.num_centroids
            used[b] = weights[i]
            if search.score_bits > 0:
                used[b] *= scales[starts[i]]
            sound = sound and abs(used[b]) < np.inf
        slope = search.softmax_scale * LOG2_E
        if search.score_bits > 0:
            unit, integers = integer_weights(used, 127 if search.score_bits == 8 else 7)
            slope *= unit
            for b in range(num_subspaces):
                multipliers[row * room + b] = integers[b]
        elif not sound:
            for b in range(num_subspaces):
                weights[row * room + b] = 0.0
        slopes[row] = slope
    return 0


def score_rows_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: all query rows of the group over one range: rows that they share are read from memory once."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    number = piece % NEXT_IS_KNOWN
    first, last = range_of(search, number)
    group_size, room, stride = search.group_size, scratch.row_room, scratch.stride
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    scores = array_at(slot + scratch.at_scores, group_size * stride, np.int16(0))
    rows = group_size * room
    # of this job and the next
    numbers = array_at(scratch.starts + 8 * job * rows, 2 * rows, np.int64(0))
    multipliers = array_at(scratch.multipliers + 8 * job * rows, 2 * rows, np.int64(0))
    in_tail = number >= search.context_ranges
    starts = numbers * (search.tail_room if in_tail else search.row_stride)
    tail_bytes = search.num_heads * search.num_subspaces * search.num_centroids * search.tail_room
    codes = array_at(
        search.tail_codes if in_tail else search.codes, tail_bytes if in_tail else search.code_bytes, np.uint8(0)
    )
    offset = first - search.tail_at if in_tail else first
    num_bytes = -(-(last - first) // STEP_BYTES) * STEP_BYTES
    for row in range(group_size):
        at = row * stride + first
        if in_tail or search.score_bits == 8:
            add_rows8(codes, starts, multipliers, row * room, search.num_subspaces, offset, num_bytes, scores, at)
        else:
            next_is_known = piece >= NEXT_IS_KNOWN
            _score_rows4(search, starts, multipliers, rows, row * room, room, first, last, scores, at, next_is_known)
        _keep_range(search, scratch, slot, job, row, number, scores)
    return 0


@exact_kernel
def _score_rows4(
    search: Any,
    starts: NDArray[np.int64],  # [2 * num_rows]: of all query rows of this job and of the next
    multipliers: NDArray[np.int64],
    num_rows: int,
    row: int,  # the query row's first
    room: int,  # and how many they are
    first: int,
    last: int,
    scores: NDArray[np.int16],
    at: int,
    next_is_known: bool,
) -> None:
    """Keys [first, last) of the context for one query row."""
    codes = array_at(search.codes, search.code_bytes, np.uint8(0))
    begin, end = first // 2, min(search.row_bytes, -(-last // 128) * 64)
    whole = (end - begin) // STEP_BYTES * STEP_BYTES
    next_row = row + room
    if next_row == num_rows and not next_is_known:
        next_row = row  # of no use, but harmless
    add_rows4(codes, starts, multipliers, row, room, begin, whole, scores, at, next_row, begin)
    rest = begin + whole
    if rest < end:
        # half a step is left: add it from a copy, so that nothing is read beyond the last row
        edge, edge_starts = np.empty(room * STEP_BYTES, np.uint8), np.empty(num_rows, np.int64)
        for b in range(row, row + room):
            edge_starts[b] = (b - row) * STEP_BYTES - rest
            for i in range(end - rest):
                edge[(b - row) * STEP_BYTES + i] = codes[starts[b] + rest + i]
        step = max(STEP_BYTES, end - rest)
        add_rows4(edge, edge_starts, multipliers, row, room, rest, step, scores, at + 2 * whole, row, rest)


def score_lists_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: all keys for one query row."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    row = piece % NEXT_IS_KNOWN
    list_len, tail_room, stride = search.list_len, search.tail_room, scratch.stride
    num_lists = search.num_heads * search.num_subspaces * search.num_centroids
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    size = search.group_size * scratch.row_room
    scores = array_at(slot + scratch.at_scores, search.group_size * stride, np.float32(0))
    lists = array_at(scratch.starts + 8 * job * size, size, np.int64(0))
    weights = array_at(scratch.weights + 8 * job * size, size, np.float64(0))
    indices = array_at(search.list_indices, num_lists * list_len, np.int32(0))
    halves = array_at(search.list_scores, num_lists * list_len, np.uint16(0))
    num_inserted = array_at(search.num_inserted, num_lists if tail_room > 0 else 0, np.int32(0))
    inserted_indices = array_at(search.inserted_indices, num_lists * tail_room, np.int32(0))
    inserted_scores = array_at(search.inserted_scores, num_lists * tail_room, np.float32(0))
    step = np.empty(KEYS_PER_STEP, np.float32)
    at = row * stride
    clear_scores(scores, at, search.context_len + search.tail_rows)
    for i in range(row * scratch.row_room, row * scratch.row_room + search.num_subspaces):
        number, weight = lists[i], np.float32(weights[i])
        inserted = np.int64(num_inserted[number]) if tail_room > 0 else 0
        add_list(scores, at, indices, halves, number * list_len, list_len - inserted, weights[i], step)
        for entry in range(number * tail_room, number * tail_room + inserted):
            scores[at + inserted_indices[entry]] += weight * inserted_scores[entry] + np.float32(0)
    for number in range(search.num_ranges):
        _keep_range(search, scratch, slot, job, row, number, scores)
    return 0


@exact_kernel
def _keep_range(search: Any, scratch: Any, slot: int, job: int, row: int, number: int, scores: NDArray[Any]) -> None:
    """Keep what the second half of the job needs of one range of one query row: powers, their sum, a sample."""
    group_size, stride = search.group_size, scratch.stride
    if group_size > 1:
        first, last = range_of(search, number)
        size, i = search.num_ranges * group_size, number * group_size + row
        powers = array_at(slot + scratch.at_powers, group_size * stride, np.float32(0))
        shifts = array_at(slot + scratch.at_shifts, size, np.float64(0))
        totals = array_at(slot + scratch.at_totals, size, np.float64(0))
        lowest = array_at(slot + scratch.at_lowest, size, np.float64(0))
        slope = array_at(scratch.slopes + 4 * job * group_size, group_size, np.float32(0))[row]
        shifts[i], totals[i], lowest[i] = keep_powers(scores, powers, row * stride + first, last - first, slope)
    step = search.sample_step
    if step > 1:
        sample = array_at(slot + scratch.at_sample, group_size * scratch.sample_stride, scores[0])
        to = row * scratch.sample_stride
        for earlier in range(number):
            first, last = eligible_of(search, earlier)
            to += (last - first) // step
        first, last = eligible_of(search, number)
        at, phase = row * stride + first, 0
        for i in range((last - first) // step):
            sample[to + i] = scores[np.uint64(at + phase)]
            at += step
            phase += 1  # walking: no period of the scores lines up with it
            if phase == step:
                phase = 0
