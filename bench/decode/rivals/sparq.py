"""SparQ (arXiv:2312.04985) on the CPU: logits from the channels where the group's queries are largest, read from a copy
of the keys in which channels lie together; definition: `csattn.selectors.sparq`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.decode.rivals.best_rows import (
    FIELDS,
    RANGE_KEYS,
    add_choice,
    choice_at,
    eligible_of,
    num_ranges,
    tell_choice,
)
from bench.decode.rivals.records import Told, reader_of, record_of, scratch
from csattn.cpu.floats import exp_lanes, load_floats, sum_of
from csattn.cpu.tape import Tape
from csattn.jit import exact_kernel
from csattn.search.atomics import array_at
from csattn.search.lanes import fma, larger, where_less
from csattn.search.simd import F32x16, I32x16, as_bits, fill, lane_numbers, load, prefetch_early, store

LANES = 16
BLOCK = 512  # keys whose logits stay in the first-level cache while channels are added
AT_ONCE = 4  # channels

SPARQ = record_of(
    (
        *FIELDS,
        "q",  # [num_heads, group_size, head_dim] float32
        "head_dim",
        "num_components",  # a multiple of AT_ONCE
        "channels",  # [num_heads, head_dim, num_keys] bfloat16: the context's keys
        "tail_channels",  # [num_heads, head_dim, tail_capacity] bfloat16: the request's own
        "tail_capacity",  # a multiple of LANES
        "tail_len",
        "best",  # [num_heads, num_components] int64: channels
        "weights",  # [num_heads, group_size, num_components] float32: q there, scaled
        "logits",  # [num_heads, group_size, stride + tail_capacity] float32
        "sums",  # [num_heads, num_ranges + 1, group_size, 3] float32: largest logit; sums of powers: all, eligible
        "shares",  # [num_heads, group_size] float32, written: of the rows that are neither resident nor chosen
    ),
    ("softmax_scale",),
)
sparq_at = reader_of(SPARQ)


class SparqSearch:
    """One row's search of a layer: fill `q`, point `channels` and `tail_channels` at it, run the tape."""

    def __init__(
        self,
        shape: tuple[int, int, int],  # num_heads, group_size, head_dim
        num_keys: int,
        middle: slice,
        top_k: int,
        softmax_scale: float,
        num_components: int,
        tail_capacity: int,
    ) -> None:
        num_heads, group_size, head_dim = shape
        assert num_components % AT_ONCE == 0 and tail_capacity % LANES == 0
        self.told = told = Told(SPARQ)
        tell_choice(told, num_heads, group_size, num_keys, middle, top_k)
        sizes = {"head_dim": head_dim, "num_components": num_components, "tail_capacity": tail_capacity}
        for name, size in sizes.items():
            told[name] = size
        told["softmax_scale"] = softmax_scale
        ranges = num_ranges(num_keys)
        told["best"] = scratch((num_heads, num_components), np.int64)
        told["weights"] = scratch((num_heads, group_size, num_components), np.float32)
        told["logits"] = scratch((num_heads, group_size, told["worth"].shape[1] + tail_capacity), np.float32)
        told["sums"] = scratch((num_heads, ranges + 1, group_size, 3), np.float32)
        told["shares"] = scratch((num_heads, group_size), np.float32)
        self.tape = Tape()
        self.tape.add(components_stage, told.words, num_heads)
        self.tape.add(score_stage, told.words, num_heads * (ranges + 1))
        add_choice(self.tape, told, num_heads, num_keys)
        self.tape.add(rest_stage, told.words, num_heads)


def components_stage(arguments: int, head: int, thread: int, unused: int) -> int:
    """The channels where the group's |q| are largest, and the queries' parts there, their temperature put right."""
    sparq = sparq_at(arguments)
    dim, group_size, count = sparq.head_dim, sparq.group_size, sparq.num_components
    q = array_at(sparq.q + 4 * head * group_size * dim, group_size * dim, np.float32(0))
    best = array_at(sparq.best + 8 * head * count, count, np.int64(0))
    weights = array_at(sparq.weights + 4 * head * group_size * count, group_size * count, np.float32(0))
    size = np.zeros(dim, np.float32)
    for g in range(group_size):
        for i in range(dim):
            size[i] += abs(q[g * dim + i])
    for i in range(count):
        best[i] = np.argmax(size)
        size[best[i]] = -1.0
    best.sort()
    for g in range(group_size):
        covered, whole = np.float32(0.0), np.float32(0.0)
        for i in range(dim):
            whole += abs(q[g * dim + i])
        for i in range(count):
            covered += abs(q[g * dim + best[i]])
        coverage = covered / max(whole, np.float32(1e-38))
        scale = np.float32(sparq.softmax_scale / np.sqrt(max(coverage, np.float32(1e-12))))
        for i in range(count):
            weights[g * count + i] = q[g * dim + best[i]] * scale
    return 0


def score_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Logits of the keys of a range; the last range is the tail's."""
    sparq = sparq_at(arguments)
    head, number = piece // (sparq.num_ranges + 1), piece % (sparq.num_ranges + 1)
    in_tail = number == sparq.num_ranges
    first = 0 if in_tail else number * RANGE_KEYS
    num_keys = sparq.tail_len if in_tail else min(RANGE_KEYS, sparq.num_keys - first)
    length = sparq.tail_capacity if in_tail else sparq.num_keys  # of a channel
    size = sparq.head_dim * length
    channels = array_at((sparq.tail_channels if in_tail else sparq.channels) + 2 * head * size, size, np.uint16(0))
    group, row = sparq.group_size, sparq.stride + sparq.tail_capacity
    logits = array_at(sparq.logits + 4 * head * group * row, group * row, np.float32(0))
    at = sparq.stride if in_tail else first
    whole = num_keys // LANES * LANES
    for block in range(0, whole, BLOCK):
        _add_channels(sparq, head, channels, length, first + block, min(BLOCK, whole - block), logits, at + block, row)
    for i in range(whole, num_keys):
        _add_channels_of_one(sparq, head, channels, length, first + i, logits, at + i, row)
    sums = array_at(sparq.sums + 4 * 3 * piece * group, 3 * group, np.float32(0))
    begin, end = (0, 0) if in_tail else eligible_of(choice_at(arguments), number)
    for g in range(group):
        _sum_powers(logits, g * row + at, num_keys, begin - first, end - first, sums, 3 * g)
    if not in_tail:
        _rank(sparq, head, logits, row, first, num_keys)
    return 0


def rest_stage(arguments: int, head: int, thread: int, unused: int) -> int:
    """The softmax shares of the eligible rows that were not chosen."""
    sparq = sparq_at(arguments)
    group, row, ranges = sparq.group_size, sparq.stride + sparq.tail_capacity, sparq.num_ranges + 1
    logits = array_at(sparq.logits + 4 * head * group * row, group * row, np.float32(0))
    sums = array_at(sparq.sums + 4 * 3 * head * ranges * group, 3 * ranges * group, np.float32(0))
    shares = array_at(sparq.shares + 4 * head * group, group, np.float32(0))
    num_chosen = array_at(sparq.valid_len, sparq.num_heads, np.int32(0))[head]
    chosen = array_at(sparq.kv_indices + 4 * head * sparq.top_k, sparq.top_k, np.int32(0))
    picked = np.empty(LANES, np.float32)
    for g in range(group):
        top = np.float32(-np.inf)
        for i in range(ranges):
            top = max(top, sums[3 * (i * group + g)])
        total, left = 0.0, 0.0
        for i in range(ranges):
            at = 3 * (i * group + g)
            factor = np.exp(np.float64(sums[at] - top))
            total += factor * sums[at + 1]
            left += factor * sums[at + 2]
        taken = fill(F32x16, 0.0)
        for i in range(0, num_chosen, LANES):
            for j in range(LANES):
                picked[j] = logits[g * row + chosen[i + j]] if i + j < num_chosen else np.float32(-1e30)
            taken += exp_lanes(load(F32x16, picked, 0) - fill(F32x16, top))
        shares[g] = min(max((left - sum_of(taken)) / total, 0.0), 1.0)
    return 0


@exact_kernel
def _add_channels(
    sparq: Any, head: int, channels: NDArray[np.uint16], length: int, key: int, num_keys: int,
    logits: NDArray[np.float32], at: int, row: int,
) -> None:  # fmt: skip
    """Logits of whole vectors of keys from `key` on, for all query heads of the group."""
    count = sparq.num_components
    best = array_at(sparq.best + 8 * head * count, count, np.int64(0))
    weights = array_at(sparq.weights + 4 * head * sparq.group_size * count, sparq.group_size * count, np.float32(0))
    for g in range(sparq.group_size):
        for i in range(0, num_keys, LANES):
            store(logits, g * row + at + i, fill(F32x16, 0.0))
    for c in range(0, count, AT_ONCE):
        c0, c1 = best[c] * length + key, best[c + 1] * length + key
        c2, c3 = best[c + 2] * length + key, best[c + 3] * length + key
        for j in range(c + AT_ONCE, min(c + 2 * AT_ONCE, count)):
            for line in range(0, num_keys, 32):
                prefetch_early(channels, best[j] * length + key + line)
        whole = sparq.group_size // 4 * 4
        for g in range(0, whole, 4):
            _add_to_four(channels, c0, c1, c2, c3, weights, g * count + c, count, logits, g * row + at, row, num_keys)
        for g in range(whole, sparq.group_size):
            _add_to_one(channels, c0, c1, c2, c3, weights, g * count + c, logits, g * row + at, num_keys)


@exact_kernel
def _add_to_four(channels, c0, c1, c2, c3, weights, w, count, logits, at, row, num_keys):  # type: ignore[no-untyped-def]
    """Add four channels to the logits of four query heads, whose weights are `count` apart and logits `row`."""
    a0, a1, a2, a3 = _four_weights(weights, w)
    b0, b1, b2, b3 = _four_weights(weights, w + count)
    d0, d1, d2, d3 = _four_weights(weights, w + 2 * count)
    e0, e1, e2, e3 = _four_weights(weights, w + 3 * count)
    for i in range(at, at + num_keys, LANES):
        k0, k1 = load_floats(channels, c0 + i - at), load_floats(channels, c1 + i - at)
        k2, k3 = load_floats(channels, c2 + i - at), load_floats(channels, c3 + i - at)
        a = fma(k1, a1, fma(k0, a0, load(F32x16, logits, i)))
        store(logits, i, fma(k3, a3, fma(k2, a2, a)))
        b = fma(k1, b1, fma(k0, b0, load(F32x16, logits, i + row)))
        store(logits, i + row, fma(k3, b3, fma(k2, b2, b)))
        d = fma(k1, d1, fma(k0, d0, load(F32x16, logits, i + 2 * row)))
        store(logits, i + 2 * row, fma(k3, d3, fma(k2, d2, d)))
        e = fma(k1, e1, fma(k0, e0, load(F32x16, logits, i + 3 * row)))
        store(logits, i + 3 * row, fma(k3, e3, fma(k2, e2, e)))


@exact_kernel
def _add_to_one(channels, c0, c1, c2, c3, weights, w, logits, at, num_keys):  # type: ignore[no-untyped-def]
    a0, a1, a2, a3 = _four_weights(weights, w)
    for i in range(at, at + num_keys, LANES):
        k0, k1 = load_floats(channels, c0 + i - at), load_floats(channels, c1 + i - at)
        k2, k3 = load_floats(channels, c2 + i - at), load_floats(channels, c3 + i - at)
        a = fma(k1, a1, fma(k0, a0, load(F32x16, logits, i)))
        store(logits, i, fma(k3, a3, fma(k2, a2, a)))


@exact_kernel
def _four_weights(weights, w):  # type: ignore[no-untyped-def]
    first, second = fill(F32x16, weights[w]), fill(F32x16, weights[w + 1])
    return first, second, fill(F32x16, weights[w + 2]), fill(F32x16, weights[w + 3])


@exact_kernel
def _add_channels_of_one(
    sparq: Any, head: int, channels: NDArray[np.uint16], length: int, key: int,
    logits: NDArray[np.float32], at: int, row: int,
) -> None:  # fmt: skip
    count = sparq.num_components
    best = array_at(sparq.best + 8 * head * count, count, np.int64(0))
    weights = array_at(sparq.weights + 4 * head * sparq.group_size * count, sparq.group_size * count, np.float32(0))
    bits = np.empty(1, np.uint32)
    for g in range(sparq.group_size):
        total = np.float32(0.0)
        for c in range(count):
            bits[0] = np.uint32(channels[best[c] * length + key]) << np.uint32(16)
            total += bits.view(np.float32)[0] * weights[g * count + c]
        logits[g * row + at] = total


@exact_kernel
def _sum_powers(
    logits: NDArray[np.float32], at: int, num_keys: int, begin: int, end: int, sums: NDArray[np.float32], to: int
) -> None:
    """The largest of logits[at : at + num_keys], and sums of powers relative to it: of all, and of [begin, end)."""
    for i in range(num_keys, -(-num_keys // LANES) * LANES):
        logits[at + i] = np.float32(-1e30)  # behind a range's end stands what is written later
    top = fill(F32x16, np.float32(-1e30))
    for i in range(0, num_keys, LANES):
        top = larger(top, load(F32x16, logits, at + i))
    tops = np.empty(LANES, np.float32)
    store(tops, 0, top)
    largest = np.float32(tops.max())
    total, eligible = fill(F32x16, 0.0), fill(F32x16, 0.0)
    for i in range(0, num_keys, LANES):
        power = exp_lanes(load(F32x16, logits, at + i) - fill(F32x16, largest))
        total += power
        lanes = lane_numbers(I32x16)
        inside = where_less(lanes, fill(I32x16, max(begin - i, 0)), fill(F32x16, 0.0), power)
        eligible += where_less(lanes, fill(I32x16, min(max(end - i, 0), LANES)), inside, fill(F32x16, 0.0))
    sums[to], sums[to + 1], sums[to + 2] = largest, sum_of(total), sum_of(eligible)


@exact_kernel
def _rank(sparq: Any, head: int, logits: NDArray[np.float32], row: int, first: int, num_keys: int) -> None:
    """Worth: the group's logits, summed, as integers of their order."""
    worth = array_at(sparq.worth + 4 * head * sparq.stride, sparq.stride, np.int32(0))
    for i in range(first, first + num_keys, LANES):
        total = load(F32x16, logits, i)
        for g in range(1, sparq.group_size):
            total += load(F32x16, logits, g * row + i)
        bits = as_bits(I32x16, total)
        store(worth, i, bits ^ ((bits >> fill(I32x16, 31)) & fill(I32x16, 0x7FFFFFFF)))
