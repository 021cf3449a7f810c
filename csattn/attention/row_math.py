"""The arithmetic of attention in place on rows at given addresses: scores, weights, weighted sums."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.floats import exp_lanes, load_float, load_floats, sum_of, sums_of_4, sums_of_16
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger, largest_lane, where_less
from csattn.cpu.simd import LANES, F32x16, I32x16, fill, lane_numbers, load, store

LEAST = np.finfo(np.float32).min


@exact_kernel
def score_16(
    q: NDArray[np.float32],  # [group_size * head_dim]
    rows: NDArray[np.int64],  # addresses; the keys are the 16 from `first` on
    first: int,
    like: Any,  # has the type of the keys
    head_dim: int,
    group_size: int,
    softmax_scale: float,
    scores: NDArray[np.float32],  # [group_size * room], written
    at: int,
    room: int,
) -> None:
    """scores[g * room + at + i] = softmax_scale * q[g] . k[i], for 16 keys."""
    whole, scale = head_dim - head_dim % LANES, np.float32(softmax_scale)
    for g in range(group_size):
        a = _four_dots(q, g * head_dim, rows, first, like, whole)
        b = _four_dots(q, g * head_dim, rows, first + 4, like, whole)
        c = _four_dots(q, g * head_dim, rows, first + 8, like, whole)
        d = _four_dots(q, g * head_dim, rows, first + 12, like, whole)
        place = g * room + at
        store(scores, place, sums_of_16(a, b, c, d))
        for i in range(LANES):
            for j in range(whole, head_dim):
                scores[place + i] += q[g * head_dim + j] * load_float(array_at(rows[first + i], head_dim, like), j)
        store(scores, place, load(F32x16, scores, place) * fill(F32x16, scale))


@exact_kernel
def _four_dots(q, at, rows, first, like, whole):  # type: ignore[no-untyped-def]
    """Dot products of a query with four keys, partially summed as `sums_of_16` takes them."""
    k0, k1 = array_at(rows[first], whole, like), array_at(rows[first + 1], whole, like)
    k2, k3 = array_at(rows[first + 2], whole, like), array_at(rows[first + 3], whole, like)
    zero = fill(F32x16, 0.0)
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, whole, LANES):
        part = load(F32x16, q, at + i)
        a = fma(part, load_floats(k0, i), a)
        b = fma(part, load_floats(k1, i), b)
        c = fma(part, load_floats(k2, i), c)
        d = fma(part, load_floats(k3, i), d)
    return sums_of_4(a, b, c, d)


@exact_kernel
def cap_logits(logits: NDArray[np.float32], cap: float) -> None:
    """logits = cap * tanh(logits / cap), in place; their number is a multiple of LANES."""
    one, two, by = fill(F32x16, 1.0), fill(F32x16, 2.0), fill(F32x16, np.float32(2.0 / cap))
    for i in range(0, len(logits), LANES):
        powers = exp_lanes(load(F32x16, logits, i) * by)
        store(logits, i, fill(F32x16, np.float32(cap)) * (one - two / (one + powers)))


@exact_kernel
def softmax_weights(
    weights: NDArray[np.float32], at: int, count: int, room: int, part: NDArray[np.float32], words: int
) -> None:
    """Turn scores into exp(score - largest); write the largest and the sum after the part's first `words` words.

    A score of NaN or infinity makes the result NaN, whatever the other scores are.
    """
    largest = fill(F32x16, LEAST)  # finite, so that -inf minus it stays -inf
    for i in range(0, room, LANES):  # scores after the first `count` repeat the last row's
        largest = larger(load(F32x16, weights, at + i), largest)
    top = largest_lane(largest)
    sums = fill(F32x16, 0.0)
    for i in range(0, room, LANES):
        power = exp_lanes(load(F32x16, weights, at + i) - fill(F32x16, top))
        power = where_less(lane_numbers(I32x16), fill(I32x16, count - i), power, fill(F32x16, 0.0))
        store(weights, at + i, power)
        sums += power
    part[words], part[words + 1] = top, sum_of(sums)


@exact_kernel
def add_weighted_values(
    weights: NDArray[np.float32],  # the rows' weights begin at `at`
    at: int,
    rows: NDArray[np.int64],  # addresses
    count: int,  # number of rows, a multiple of 4
    start: int,  # of a row's value, in elements
    like: Any,  # has the type of the values
    head_dim: int,
    part: NDArray[np.float32],
) -> None:
    """part[:head_dim] += the sum of the values times their weights."""
    whole, end = head_dim - head_dim % LANES, start + head_dim
    for i in range(0, count, 4):
        v0, v1 = array_at(rows[i], end, like), array_at(rows[i + 1], end, like)
        v2, v3 = array_at(rows[i + 2], end, like), array_at(rows[i + 3], end, like)
        place = at + i
        w0, w1, w2, w3 = weights[place], weights[place + 1], weights[place + 2], weights[place + 3]
        for j in range(0, whole, LANES):
            mixed = fma(fill(F32x16, w0), load_floats(v0, start + j), load(F32x16, part, j))
            mixed = fma(fill(F32x16, w1), load_floats(v1, start + j), mixed)
            mixed = fma(fill(F32x16, w2), load_floats(v2, start + j), mixed)
            store(part, j, fma(fill(F32x16, w3), load_floats(v3, start + j), mixed))
        for j in range(whole, head_dim):
            mixed_one = part[j] + w0 * load_float(v0, start + j)
            mixed_one += w1 * load_float(v1, start + j)
            mixed_one += w2 * load_float(v2, start + j)
            part[j] = mixed_one + w3 * load_float(v3, start + j)
