"""The second half of a job over lists: compute the keys' group scores, and copy out the best, range by range.

`choose_job`, the choice among the copies, also ends the search of jobs over sketches.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import mask_at_least
from csattn.cpu.simd import LANES, I32x16, fill, lane_numbers, load, store
from csattn.search.group_scores import NO_SHIFT, NOT_SCORED, as_group_scores, group_scores_of_shares, share_terms
from csattn.search.plan import eligible_of, place_of, scratch_at, search_at
from csattn.search.score import rescale_scores
from csattn.search.select import first_rank, guess_threshold, store_lanes, take_best
from csattn.search.sketch_group_scores import LEAST_GROUP_SCORE
from csattn.sketch.reference import LOG2_E


def guess_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: combine the ranges' sums, and guess a group score that a few more than top_k keys reach."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    group_size, sample_stride = search.group_size, scratch.sample_stride
    if group_size > 1:
        for row in range(group_size):
            rescale_scores(search, scratch, slot, row)
        _combine_terms(search, scratch, slot)
    sample = array_at(slot + scratch.at_sample, group_size * sample_stride, np.float32(0))
    group_scores = array_at(slot + scratch.at_sample_group_scores, sample_stride, np.int32(0))
    terms = array_at(slot + scratch.at_terms, 4 * group_size, np.float32(0))
    for at in range(0, num_sampled(search), LANES):
        if group_size > 1:
            store(group_scores, at, group_scores_of_shares(sample, sample_stride, at, terms))
        else:
            store(group_scores, at, as_group_scores(sample, at))
    first_guess(search, scratch, slot)
    return 0


def copy_piece(search_address: int, scratch_address: int, job: int, piece: int) -> int:
    """Stage: copy out, in order, the keys of one range whose group score reaches the guess.

    They are written from where the range begins, their group scores beside them, and how many they are.
    """
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    group_size, stride = search.group_size, scratch.stride
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    scores = array_at(slot + scratch.at_scores, group_size * stride, np.float32(0))
    terms = array_at(slot + scratch.at_terms, 4 * group_size, np.float32(0))
    copied = array_at(slot + scratch.at_copied, stride, np.int32(0))
    copied_group_scores = array_at(slot + scratch.at_copied_group_scores, stride, np.int32(0))
    guess = array_at(slot + scratch.at_guess, 1, np.int64(0))[0]
    threshold = fill(I32x16, guess)
    first, last = eligible_of(search, piece)
    to = first
    numbers = lane_numbers(I32x16)
    for at in range(first, last, LANES):
        if group_size == 1:
            group_scores = as_group_scores(scores, at)
        else:
            group_scores = group_scores_of_shares(scores, stride, at, terms)
        bits = mask_at_least(group_scores, threshold)
        if last - at < LANES:
            bits &= (np.uint64(1) << np.uint64(last - at)) - np.uint64(1)
        store_lanes(copied, to, numbers + fill(I32x16, at), bits)
        to += store_lanes(copied_group_scores, to, group_scores, bits)
    array_at(slot + scratch.at_counts, search.num_ranges, np.int64(0))[piece] = to - first
    return 0


def choose_job(search_address: int, scratch_address: int, job: int, _: int) -> int:
    """Stage: choose among the copied keys. Returns 1 if too few reached the guess: it has been lowered, copy again."""
    search, scratch = search_at(search_address), scratch_at(scratch_address)
    slot = scratch.slots + job % scratch.num_slots * scratch.slot_bytes
    guess = array_at(slot + scratch.at_guess, 2, np.int64(0))
    counts = array_at(slot + scratch.at_counts, search.num_ranges, np.int64(0))
    num_copied, top_k, lowest = np.int64(0), search.top_k, _lowest_group_score(search)
    for number in range(search.num_ranges):
        num_copied += counts[number]
    if num_copied < top_k and guess[0] > lowest:
        group_scores = array_at(slot + scratch.at_sample_group_scores, scratch.sample_stride, np.int32(0))
        guess[1] *= 2
        guess[0] = guess_threshold(group_scores, num_sampled(search), guess[1], lowest)
        return 1
    copied = array_at(slot + scratch.at_copied, scratch.stride, np.int32(0))
    copied_group_scores = array_at(slot + scratch.at_copied_group_scores, scratch.stride, np.int32(0))
    _join_ranges(search, counts, copied, copied_group_scores)
    token, head = place_of(search, job)
    place = token * search.num_heads + head
    chosen = array_at(search.kv_indices + 4 * place * top_k, top_k, np.int32(0))
    valid_len = array_at(search.valid_len + 4 * place, 1, np.int32(0))
    valid_len[0] = take_best(copied, copied_group_scores, num_copied, guess[0], chosen)
    return 0


@exact_kernel
def first_guess(search: Any, scratch: Any, slot: int) -> None:
    """Make the first guess from the group scores of the sampled keys."""
    guess = array_at(slot + scratch.at_guess, 2, np.int64(0))
    group_scores = array_at(slot + scratch.at_sample_group_scores, scratch.sample_stride, np.int32(0))
    count = num_sampled(search)
    guess[1] = first_rank(search.top_k, count, search.sample_step)
    guess[0] = guess_threshold(group_scores, count, guess[1], _lowest_group_score(search))


@exact_kernel
def _combine_terms(search: Any, scratch: Any, slot: int) -> None:
    """Combine the ranges' shifts and sums into those over all keys, and compute each query row's `share_terms`."""
    group_size, num_ranges = search.group_size, search.num_ranges
    shifts = array_at(slot + scratch.at_shifts, num_ranges * group_size, np.float64(0))
    totals = array_at(slot + scratch.at_totals, num_ranges * group_size, np.float64(0))
    terms = array_at(slot + scratch.at_terms, 4 * group_size, np.float32(0))
    slope_of_all = np.float64(np.float32(search.softmax_scale * LOG2_E))
    for row in range(group_size):
        shift, total = NO_SHIFT, 0.0
        for i in range(row, num_ranges * group_size, group_size):
            shift = max(shift, shifts[i])
        for i in range(row, num_ranges * group_size, group_size):
            total += np.ldexp(totals[i], int(max(shifts[i] - shift, -2000.0)))
        slope, floor, rounder, factor = share_terms(slope_of_all, shift, total)
        terms[4 * row], terms[4 * row + 1], terms[4 * row + 2], terms[4 * row + 3] = slope, floor, rounder, factor


@exact_kernel
def num_sampled(search: Any) -> int:
    """Return how many keys of each query row are sampled."""
    count = 0
    if search.sample_step > 1:
        for number in range(search.num_ranges):
            first, last = eligible_of(search, number)
            count += (last - first) // search.sample_step
    return count


@exact_kernel
def _lowest_group_score(search: Any) -> int:
    """Return the group score that every key reaches that may be chosen: scored ones, or all if top_k covers them."""
    if search.sketch != 0:
        return LEAST_GROUP_SCORE
    num_eligible = 0
    for number in range(search.num_ranges):
        first, last = eligible_of(search, number)
        num_eligible += last - first
    if search.top_k >= num_eligible:
        return NOT_SCORED
    return 1 if search.group_size > 1 else NOT_SCORED + 1  # shares are positive


@exact_kernel
def _join_ranges(
    search: Any, counts: NDArray[np.int64], copied: NDArray[np.int32], copied_group_scores: NDArray[np.int32]
) -> None:
    """Move the ranges' copies to the front, without gaps."""
    to = 0
    for number in range(search.num_ranges):
        first, _ = eligible_of(search, number)
        whole = counts[number] - counts[number] % LANES
        for i in range(0, whole, LANES):
            store(copied, to + i, load(I32x16, copied, first + i))
            store(copied_group_scores, to + i, load(I32x16, copied_group_scores, first + i))
        for i in range(whole, counts[number]):
            copied[to + i] = copied[first + i]
            copied_group_scores[to + i] = copied_group_scores[first + i]
        to += counts[number]
