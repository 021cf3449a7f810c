"""The first half of a job over lists: match its queries, score its keys, and sum their powers for the softmax."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel
from csattn.search.group_scores import LARGEST_SHIFT, NO_SHIFT, sum_powers
from csattn.search.lists import (
    WEIGHTED_ROOM,
    WORDS,
    add_chunk,
    clear_scores,
    exclude_lower_scores,
    write_weighted_scores,
)
from csattn.search.match import match_centroids, widen
from csattn.search.plan import eligible_of, place_of, range_of, scratch_at, search_at
from csattn.sketch.reference import LOG2_E
from csattn.table.lists import CHUNK_KEYS


def match_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: find the group's nearest centroids in some subspaces."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    token, head = place_of(search, job)
    num_subspaces = search.num_subspaces
    subspace_dim = search.head_dim // num_subspaces
    first = piece * search.match_parts
    last = min(first + search.match_parts, num_subspaces)
    of_subspace = subspace_dim * search.centroid_room
    place = (head * num_subspaces + first) * of_subspace
    columns = array_at(search.codebook_columns + 4 * place, (last - first) * of_subspace, np.float32(0))
    centroid_ids, weights = _matches_of(search, scratch, job)
    q = widen(queries_of(search, token, head))
    match_centroids(
        q, columns, first, last, search.group_size, search.num_centroids, subspace_dim, search.weigh_by_norm != 0,
        centroid_ids, weights, num_subspaces,
    )  # fmt: skip
    return 0


def number_lists_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: turn centroid ids into the numbers of their lists; a query that is not finite gets weights of 0."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    _, head = place_of(search, job)
    group_size, num_subspaces = search.group_size, search.num_subspaces
    lists, weights = _matches_of(search, scratch, job)
    for row in range(group_size):
        first, is_finite = row * num_subspaces, True
        for b in range(num_subspaces):
            lists[first + b] += (head * num_subspaces + b) * search.num_centroids
            is_finite = is_finite and abs(weights[first + b]) < np.inf
        if not is_finite:
            for b in range(num_subspaces):
                weights[first + b] = 0.0
    return 0


def score_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: score some ranges of keys for one query row. A row's last piece also scores the tail's keys."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    row, part = divmod(piece, search.row_parts)
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    scores = array_at(slot + scratch.at_scores, search.group_size * scratch.stride, np.float32(0))
    of_group, weights_of_group = _matches_of(search, scratch, job)
    first, last, at = row * search.num_subspaces, (row + 1) * search.num_subspaces, row * scratch.stride
    lists, weights = of_group[first:last], weights_of_group[first:last]
    begin, end = part * search.part_ranges, min((part + 1) * search.part_ranges, search.context_ranges)
    for number in range(begin, end):
        _score_range(search, lists, weights, scores, at, number)
        _keep_range(search, scratch, slot, row, number, scores)
    if part == search.row_parts - 1 and search.tail_rows > 0:
        _score_tail(search, lists, weights, scores, at)
        for number in range(search.context_ranges, search.num_ranges):
            _keep_range(search, scratch, slot, row, number, scores)
    return 0


@exact_kernel
def _score_range(
    search: Any,
    lists: NDArray[np.int64],
    weights: NDArray[np.float64],
    scores: NDArray[np.float32],
    at: int,
    number: int,
) -> None:
    """Score a range of the context's keys by the shared lists' entries that still count; key 0's score is at `at`."""
    num_lists = search.num_heads * search.num_subspaces * search.num_centroids
    chunks, list_len, room = -(-search.context_len // CHUNK_KEYS), search.list_len, search.score_room
    listed = array_at(search.listed, num_lists * chunks * WORDS, np.uint64(0))
    starts = array_at(search.starts, num_lists * chunks, np.int32(0))
    halves = array_at(search.list_scores, num_lists * room, np.int16(0))
    with_tail = num_lists if search.tail_room > 0 else 0
    num_inserted = array_at(search.num_inserted, with_tail, np.int32(0))
    kept_least = array_at(search.kept_least, with_tail, np.float32(0))
    kept_position = array_at(search.kept_position, with_tail, np.int32(0))
    weighted = np.empty(WEIGHTED_ROOM, np.float32)
    first_key, last_key = range_of(search, number)
    for chunk in range(first_key // CHUNK_KEYS, -(-last_key // CHUNK_KEYS)):
        start = at + chunk * CHUNK_KEYS
        clear_scores(scores, start, CHUNK_KEYS)
        for i in range(len(lists)):
            place, base = lists[i] * chunks + chunk, lists[i] * room
            first = base + starts[place]
            last = base + (starts[place + 1] if chunk + 1 < chunks else list_len)
            begin = write_weighted_scores(halves, first, last, weights[i], weighted)
            if with_tail > 0 and num_inserted[lists[i]] > 0:
                least, kept = kept_least[lists[i]], base + kept_position[lists[i]]
                exclude_lower_scores(halves, first, last, least, kept, weighted, begin)
            add_chunk(scores, start, listed, place * WORDS, weighted, begin)


@exact_kernel
def _score_tail(
    search: Any, lists: NDArray[np.int64], weights: NDArray[np.float64], scores: NDArray[np.float32], at: int
) -> None:
    """Score the tail's keys by the lists that they have entered; the score of the context's key 0 is at `at`."""
    tail_room, num_lists = search.tail_room, search.num_heads * search.num_subspaces * search.num_centroids
    num_inserted = array_at(search.num_inserted, num_lists, np.int32(0))
    inserted_indices = array_at(search.inserted_indices, num_lists * tail_room, np.int32(0))
    inserted_scores = array_at(search.inserted_scores, num_lists * tail_room, np.float32(0))
    clear_scores(scores, at + search.context_len, search.tail_rows)
    for i in range(len(lists)):
        first, weight = lists[i] * tail_room, np.float32(weights[i])
        for entry in range(first, first + num_inserted[lists[i]]):
            scores[at + inserted_indices[entry]] += weight * inserted_scores[entry] + np.float32(0)


@exact_kernel
def rescale_scores(search: Any, scratch: Any, slot: int, row: int) -> None:
    """Divide a query row's scores by a power of 2 if they are too large to be exponents: their softmax has one key."""
    num_shifts = search.num_ranges * search.group_size
    shifts, largest = array_at(slot + scratch.at_shifts, num_shifts, np.float64(0)), 0.0
    for i in range(row, num_shifts, search.group_size):
        if shifts[i] != NO_SHIFT:
            largest = max(largest, abs(shifts[i]))
    if not LARGEST_SHIFT < largest < np.inf:
        return
    scores = array_at(slot + scratch.at_scores, search.group_size * scratch.stride, np.float32(0))
    factor, at = np.float32(2.0 ** -np.ceil(np.log2(largest / LARGEST_SHIFT))), row * scratch.stride
    for key in range(at, at + search.context_len + search.tail_rows):
        if scores[key] != 0:  # an underflow must not become -0.0, the mark of a key in no list
            scores[key] = scores[key] * factor + np.float32(0)
    for number in range(search.num_ranges):
        _keep_range(search, scratch, slot, row, number, scores)


@exact_kernel
def queries_of(search: Any, token: int, head: int) -> NDArray[np.float32]:
    """Return a job's queries [group_size * head_dim]."""
    size = search.group_size * search.head_dim
    queries: NDArray[np.float32] = array_at(
        search.q + 4 * (token * search.num_heads + head) * size, size, np.float32(0)
    )
    return queries


@exact_kernel
def _matches_of(search: Any, scratch: Any, job: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a job's lists and their weights: both [group_size * num_subspaces]."""
    size = search.group_size * search.num_subspaces
    queries = scratch.queries + job * scratch.query_bytes
    return array_at(queries, size, np.int64(0)), array_at(queries + 8 * size, size, np.float64(0))


@exact_kernel
def _keep_range(search: Any, scratch: Any, slot: int, row: int, number: int, scores: NDArray[np.float32]) -> None:
    """Keep what the second half of the job needs from one range of a query row: the sum of its powers, and a sample."""
    group_size = search.group_size
    if group_size > 1:
        first, last = range_of(search, number)
        size, i = search.num_ranges * group_size, number * group_size + row
        shifts = array_at(slot + scratch.at_shifts, size, np.float64(0))
        totals = array_at(slot + scratch.at_totals, size, np.float64(0))
        slope = np.float32(search.softmax_scale * LOG2_E)
        shifts[i], totals[i] = sum_powers(scores, row * scratch.stride + first, last - first, slope)
    keep_sample(search, scratch, slot, row, number, scores)


@exact_kernel
def keep_sample(search: Any, scratch: Any, slot: int, row: int, number: int, scores: NDArray[Any]) -> None:
    """Copy the scores of one range of a query row that the first guess is made from."""
    step = search.sample_step
    if step == 1:
        return
    sample = array_at(slot + scratch.at_sample, search.group_size * scratch.sample_stride, scores[0])
    to = row * scratch.sample_stride
    for earlier in range(number):
        first, last = eligible_of(search, earlier)
        to += (last - first) // step
    first, last = eligible_of(search, number)
    at, phase = row * scratch.stride + first, 0
    for i in range((last - first) // step):
        sample[to + i] = scores[np.uint64(at + phase)]
        at += step
        phase += 1  # it shifts with every sample, so that no period of the scores aligns with it
        if phase == step:
            phase = 0
