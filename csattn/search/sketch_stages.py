"""The stages of a job over a sketch: project queries, score keys, compute group scores, and copy out the best.

`choose.choose_job` then chooses among the copies. If the rest is wanted, a last stage attends to the rows that are not
chosen, by their scores, which are still there. Each range yields a part; parts are merged in the order of the ranges.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import mask_at_least, trailing_zeros
from csattn.cpu.simd import LANES, I32x16, U16x16, U16x32, convert, fill, load, store
from csattn.search.choose import first_guess, num_sampled
from csattn.search.match import widen
from csattn.search.plan import eligible_of, place_of, range_of, scratch_at, search_at
from csattn.search.rest import attend_rows, join_parts
from csattn.search.score import keep_sample, queries_of
from csattn.search.sketch import exponent_of, project_queries, quantise_queries, sketch_at
from csattn.search.sketch_group_scores import MARKED, best_share, normaliser
from csattn.search.sketch_scores import score_range
from csattn.sketch.codes import BLOCK_KEYS
from csattn.sketch.reference import NORMALISER_KEYS


def project_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: compute the group's coordinates in some segments."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    token, head = place_of(search, job)
    first = piece * search.match_parts
    last = min(first + search.match_parts, search.num_parts)
    queries, q = _queries_at(scratch, job), widen(queries_of(search, token, head))
    project_queries(sketch_at(search.sketch), head, q, first, last, search.softmax_scale, queries)
    return 0


def quantise_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: turn coordinates into the integers that multiply codes."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    quantise_queries(sketch_at(search.sketch), search.group_size, _queries_at(scratch, job))
    return 0


def score_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: score one range for all query rows of the group, so that codes are read from memory once."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    first, last = range_of(search, piece)
    _, head = place_of(search, job)
    group_size, stride, slot = search.group_size, scratch.stride, _slot_of(scratch, job)
    scores = _scores_of(search, scratch, slot)
    queries = _queries_at(scratch, job)
    greatest = _greatest_of(search, scratch, slot)
    score_range(sketch_at(search.sketch), head, queries, group_size, first, last, scores, stride, first, greatest)
    for row in range(group_size):
        keep_sample(search, scratch, slot, row, piece, scores)
    return 0


def guess_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: compute the query rows' normalisers, and guess a group score that a few more than top_k keys reach."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    group_size, stride, slot = search.group_size, scratch.sample_stride, _slot_of(scratch, job)
    _compute_shifts(search, scratch, slot, exponent_of(_queries_at(scratch, job)))
    shifts = _shifts_of(search, scratch, slot)
    sample = array_at(slot + scratch.at_sample, group_size * stride, np.uint16(0))
    group_scores = np.empty(2 * LANES, np.uint16)
    wide = array_at(slot + scratch.at_sample_group_scores, stride, np.int32(0))
    for at in range(0, num_sampled(search), 2 * LANES):
        store(group_scores, 0, best_share(sample, stride, at, shifts))
        store(wide, at, convert(I32x16, load(U16x16, group_scores, 0)))
        store(wide, at + LANES, convert(I32x16, load(U16x16, group_scores, LANES)))
    first_guess(search, scratch, slot)
    return 0


def copy_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: copy out, in order, the marked keys of one range and those whose group score reaches the guess.

    They are written from where the range begins, their group scores beside them, and how many they are.
    """
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    slot, stride = _slot_of(scratch, job), scratch.stride
    scores, shifts = _scores_of(search, scratch, slot), _shifts_of(search, scratch, slot)
    _, head = place_of(search, job)
    sketch = sketch_at(search.sketch)
    marks = array_at(sketch.marks + 8 * head * sketch.num_blocks, 2 * sketch.num_blocks, np.uint32(0))
    copied = array_at(slot + scratch.at_copied, stride, np.int32(0))
    copied_group_scores = array_at(slot + scratch.at_copied_group_scores, stride, np.int32(0))
    limits = fill(U16x32, array_at(slot + scratch.at_guess, 1, np.int64(0))[0])
    first, last = eligible_of(search, piece)
    group_scores, to = np.empty(BLOCK_KEYS, np.uint16), first
    for at in range(first // BLOCK_KEYS * BLOCK_KEYS, last, BLOCK_KEYS):
        low, high = best_share(scores, stride, at, shifts), best_share(scores, stride, at + 2 * LANES, shifts)
        bits, marked = mask_at_least(low, limits) | mask_at_least(high, limits) << np.uint64(2 * LANES), np.uint64(0)
        if search.uses_marks != 0:
            block = 2 * (at // BLOCK_KEYS)
            marked = np.uint64(marks[block]) | np.uint64(marks[block + 1]) << np.uint64(32)
        bits = (bits | marked) & _keys_between(first - at, last - at)
        if bits == np.uint64(0):
            continue
        store(group_scores, 0, low)
        store(group_scores, 2 * LANES, high)
        while bits != np.uint64(0):
            i = trailing_zeros(bits)
            bits &= bits - np.uint64(1)
            copied[to] = np.uint64(at) + i
            copied_group_scores[to] = MARKED if marked >> i & np.uint64(1) != np.uint64(0) else group_scores[i]
            to += 1
    array_at(slot + scratch.at_counts, search.num_ranges, np.int64(0))[piece] = to - first
    return 0


def attend_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: attend to the rows of one range that are not chosen. This overwrites scores, which nobody reads later."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    group_size, part_words, slot = search.group_size, search.head_dim + 2, _slot_of(scratch, job)
    token, head = place_of(search, job)
    place = token * search.num_heads + head
    num_chosen = array_at(search.valid_len + 4 * place, 1, np.int32(0))[0]
    chosen = array_at(search.kv_indices + 4 * place * search.top_k, num_chosen, np.int32(0))
    first, last = eligible_of(search, piece)
    scores, parts = _scores_of(search, scratch, slot), slot + scratch.at_parts + 4 * piece * group_size * part_words
    sketch, queries = sketch_at(search.sketch), _queries_at(scratch, job)
    attend_rows(sketch, head, queries, group_size, first, last, chosen, scores, scratch.stride, parts, part_words)
    return 0


def join_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: merge the ranges' parts into one part for each query row."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    group_size, part_words = search.group_size, search.head_dim + 2
    token, head = place_of(search, job)
    for row in range(group_size):
        at = search.rest + 4 * ((token * search.num_heads + head) * group_size + row) * part_words
        parts = _slot_of(scratch, job) + scratch.at_parts + 4 * row * part_words
        joined = array_at(at, part_words, np.float32(0))
        join_parts(parts, group_size * part_words, search.num_ranges, search.head_dim, joined)
    return 0


@exact_kernel
def _compute_shifts(search: Any, scratch: Any, slot: int, exponent: int) -> None:
    """Compute what `best_share` subtracts from each query row's scores. A single row needs no normaliser."""
    group_size, per_row = search.group_size, scratch.stride // NORMALISER_KEYS
    shifts = _shifts_of(search, scratch, slot)
    if group_size == 1:
        shifts[0] = 0
        return
    greatest, normalisers = _greatest_of(search, scratch, slot), np.empty(group_size, np.int64)
    for row in range(group_size):
        normalisers[row] = normaliser(greatest, row * per_row, -(-search.context_len // NORMALISER_KEYS), exponent)
    for row in range(group_size):
        shifts[row] = min(normalisers[row] - normalisers.min(), 2**16 - 1)


@exact_kernel
def _greatest_of(search: Any, scratch: Any, slot: int) -> NDArray[np.uint16]:
    """Return a slot's `at_greatest` [group_size * stride / NORMALISER_KEYS]; empty for a single query row."""
    size = search.group_size * scratch.stride // NORMALISER_KEYS if search.group_size > 1 else 0
    greatest: NDArray[np.uint16] = array_at(slot + scratch.at_greatest, size, np.uint16(0))
    return greatest


@exact_kernel
def _keys_between(first: int, last: int) -> np.uint64:
    """Return the bits of [first, last) among those of 64 keys."""
    bits = ~np.uint64(0)
    if first > 0:
        bits = bits << np.uint64(first)
    if last < BLOCK_KEYS:
        bits &= (np.uint64(1) << np.uint64(last)) - np.uint64(1)
    return bits


@exact_kernel
def _slot_of(scratch: Any, job: int) -> int:
    """Return the address of a job's slot of scratch memory."""
    slot: int = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    return slot


@exact_kernel
def _queries_at(scratch: Any, job: int) -> int:
    """Return the address of a job's queries: see `sketch.query_places`."""
    queries: int = scratch.queries + job * scratch.query_bytes
    return queries


@exact_kernel
def _scores_of(search: Any, scratch: Any, slot: int) -> NDArray[np.uint16]:
    """Return a slot's scores [group_size * stride]."""
    scores: NDArray[np.uint16] = array_at(slot + scratch.at_scores, search.group_size * scratch.stride, np.uint16(0))
    return scores


@exact_kernel
def _shifts_of(search: Any, scratch: Any, slot: int) -> NDArray[np.uint16]:
    """Return a slot's shifts [group_size]: see `best_share`."""
    shifts: NDArray[np.uint16] = array_at(slot + scratch.at_group_shifts, search.group_size, np.uint16(0))
    return shifts
