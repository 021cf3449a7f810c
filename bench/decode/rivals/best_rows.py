"""The best rows of each KV head, exactly: stages of a tape that follow those which say what every key is worth.

As in `csattn.search.select`: a sample guesses what a little more than top_k keys are worth, the keys that reach it are
copied out range by range, and of them the best are taken: worth descending, then index ascending.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.decode.rivals.records import Told, reader_of, record_of, scratch
from csattn.cpu.tape import Tape
from csattn.jit import exact_kernel
from csattn.search.atomics import array_at
from csattn.search.lanes import mask_at_least, trailing_zeros
from csattn.search.select import first_rank, guess_threshold, take_best
from csattn.search.simd import I32x16, fill, load
from csattn.search.worth import LANES, NOT_SCORED

RANGE_KEYS = 4096  # a piece: short contexts have enough for all cores, and what is said of its keys stays in a cache
SAMPLE = 2048  # at least that many keys are looked at for a guess, fewer than twice as many
LOWEST = NOT_SCORED + 1

FIELDS = (
    "num_heads",  # KV heads
    "group_size",  # query heads of each
    "num_keys",
    "first",  # keys [first, last) may be chosen
    "last",
    "top_k",
    "stride",  # from one head's keys to the next's: a multiple of LANES, beyond num_keys
    "num_ranges",
    "worth",  # [num_heads, stride] int32
    "copied",  # [num_heads, stride] int32
    "copied_worth",  # [num_heads, stride] int32
    "counts",  # [num_heads, num_ranges] int64
    "guesses",  # [num_heads] int64
    "kv_indices",  # [num_heads, top_k] int32, written
    "valid_len",  # [num_heads] int32, written
)
CHOICE = record_of(FIELDS)
choice_at = reader_of(CHOICE)


def tell_choice(told: Told, num_heads: int, group_size: int, num_keys: int, middle: slice, top_k: int) -> None:
    """Fill in what `FIELDS` say, with memory of its own; kv_indices and valid_len are left to the caller."""
    stride = -(-num_keys // LANES) * LANES + LANES
    sizes = {"num_heads": num_heads, "group_size": group_size, "num_keys": num_keys, "top_k": top_k, "stride": stride}
    sizes |= {"first": middle.start, "last": middle.stop, "num_ranges": num_ranges(num_keys)}
    for name, size in sizes.items():
        told[name] = size
    for name in ("worth", "copied", "copied_worth"):
        told[name] = scratch((num_heads, stride), np.int32)
    told["counts"] = scratch((num_heads, num_ranges(num_keys)), np.int64)
    told["guesses"] = scratch((num_heads,), np.int64)


def num_ranges(num_keys: int) -> int:
    return -(-num_keys // RANGE_KEYS)


def add_choice(tape: Tape, told: Told, num_heads: int, num_keys: int) -> None:
    """Append the stages that choose."""
    tape.add(guess_stage, told.words, num_heads)
    tape.add(copy_stage, told.words, num_heads * num_ranges(num_keys))
    tape.add(choose_stage, told.words, num_heads)


def guess_stage(arguments: int, head: int, thread: int, unused: int) -> int:
    choice = choice_at(arguments)
    guesses = array_at(choice.guesses, choice.num_heads, np.int64(0))
    guesses[head] = _guess(choice, head, 1)
    return 0


def copy_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    choice = choice_at(arguments)
    _copy_range(choice, piece // choice.num_ranges, piece % choice.num_ranges)
    return 0


def choose_stage(arguments: int, head: int, thread: int, unused: int) -> int:
    choice = choice_at(arguments)
    guesses = array_at(choice.guesses, choice.num_heads, np.int64(0))
    counts = array_at(choice.counts + 8 * head * choice.num_ranges, choice.num_ranges, np.int64(0))
    wider, num_copied = 2, counts.sum()
    while num_copied < choice.top_k and guesses[head] > LOWEST:
        guesses[head] = _guess(choice, head, wider)
        for number in range(choice.num_ranges):
            _copy_range(choice, head, number)
        wider, num_copied = 2 * wider, counts.sum()
    at = 4 * head * choice.stride
    copied = array_at(choice.copied + at, choice.stride, np.int32(0))
    copied_worth = array_at(choice.copied_worth + at, choice.stride, np.int32(0))
    to = 0
    for number in range(choice.num_ranges):
        first, _ = eligible_of(choice, number)
        for i in range(counts[number]):
            copied[to + i], copied_worth[to + i] = copied[first + i], copied_worth[first + i]
        to += counts[number]
    chosen = array_at(choice.kv_indices + 4 * head * choice.top_k, choice.top_k, np.int32(0))
    valid_len = array_at(choice.valid_len, choice.num_heads, np.int32(0))
    valid_len[head] = take_best(copied, copied_worth, num_copied, guesses[head], chosen)
    return 0


@exact_kernel
def eligible_of(choice: Any, number: int) -> tuple[int, int]:
    """First and one past the last key of a range that may be chosen."""
    first = max(number * RANGE_KEYS, choice.first)
    return first, max(first, min((number + 1) * RANGE_KEYS, choice.last))


@exact_kernel
def ordered(value: np.float32, room: NDArray[np.float32]) -> np.int32:
    """An int32 that orders like the float, which is not NaN. room: [1], of the caller's."""
    room[0] = value
    bits = np.int64(room.view(np.int32)[0])
    return np.int32(bits if bits >= 0 else bits ^ 0x7FFFFFFF)


@exact_kernel
def _guess(choice: Any, head: int, wider: int) -> int:
    """A worth that a little more than top_k keys reach; `wider` times as many."""
    num_eligible = choice.last - choice.first
    if num_eligible <= 2 * SAMPLE:
        return LOWEST
    step = num_eligible // SAMPLE
    worth = array_at(choice.worth + 4 * head * choice.stride, choice.stride, np.int32(0))
    sample = np.empty(2 * SAMPLE, np.int32)
    num_sampled = num_eligible // step
    for i in range(num_sampled):
        sample[i] = worth[choice.first + i * step]
    return guess_threshold(sample, num_sampled, wider * first_rank(choice.top_k, num_sampled, step), LOWEST)


@exact_kernel
def _copy_range(choice: Any, head: int, number: int) -> None:
    """Copy the keys of one range that reach the guess, in their order, to where its first eligible key stands."""
    at = 4 * head * choice.stride
    worth = array_at(choice.worth + at, choice.stride, np.int32(0))
    copied = array_at(choice.copied + at, choice.stride, np.int32(0))
    copied_worth = array_at(choice.copied_worth + at, choice.stride, np.int32(0))
    threshold = fill(I32x16, array_at(choice.guesses, choice.num_heads, np.int64(0))[head])
    first, last = eligible_of(choice, number)
    to = first
    for block in range(first, last, LANES):
        bits = mask_at_least(load(I32x16, worth, block), threshold)
        if last - block < LANES:
            bits &= (np.uint64(1) << np.uint64(last - block)) - np.uint64(1)
        while bits != np.uint64(0):
            key = block + np.int64(trailing_zeros(bits))
            copied[to], copied_worth[to] = key, worth[key]
            to += 1
            bits &= bits - np.uint64(1)
    array_at(choice.counts + 8 * head * choice.num_ranges, choice.num_ranges, np.int64(0))[number] = to - first
