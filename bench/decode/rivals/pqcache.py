"""PQCache (arXiv:2407.12820) on the CPU: products with centroids, looked up by the keys' codes; definition:
`csattn.selectors.pqcache`.

A key's logits for all query heads of its group lie side by side, so that a lookup is one load of four or more floats.
"""

import numpy as np
from numpy.typing import NDArray

from bench.decode.rivals.best_rows import FIELDS, RANGE_KEYS, add_choice, num_ranges, tell_choice
from bench.decode.rivals.records import Told, reader_of, record_of, scratch
from csattn.cpu.floats import F32x4, exp_lanes, sum_of
from csattn.cpu.tape import Tape
from csattn.jit import exact_kernel
from csattn.search.atomics import array_at
from csattn.search.lanes import fma, larger
from csattn.search.simd import F32x16, fill, load, store

LANES = 16
NOTHING = np.float32(-1e30)  # a logit whose power is 0

PQ = record_of(
    (
        *FIELDS,
        "q",  # [num_heads, group_size, head_dim] float32
        "head_dim",
        "num_subspaces",
        "num_centroids",
        "centroids",  # [num_heads, num_subspaces, num_centroids, subspace_dim] float32
        "codes",  # [num_heads, num_keys, num_subspaces] uint8
        "width",  # group_size, rounded up to 4, 8 or 16
        "products",  # [num_heads, num_subspaces, num_centroids, width] float32, scaled; 0 beyond group_size
        "powers",  # [num_heads, stride, width] float32
        "shifts",  # [num_heads, num_ranges, LANES] float32: the largest logits of a range
        "totals",  # [num_heads, num_ranges, LANES] float32: sums of its powers, then what makes shares of them
    ),
    ("softmax_scale",),
)
pq_at = reader_of(PQ)


class PqSearch:
    """One row's search of a layer: fill `q`, point `codes` and `centroids` at the layer, run the tape."""

    def __init__(
        self,
        shape: tuple[int, int, int],  # num_heads, group_size, head_dim
        num_keys: int,
        middle: slice,
        top_k: int,
        softmax_scale: float,
        num_subspaces: int,
        num_centroids: int,
    ) -> None:
        num_heads, group_size, head_dim = shape
        assert group_size <= LANES and head_dim // num_subspaces % LANES == 0
        self.told = told = Told(PQ)
        tell_choice(told, num_heads, group_size, num_keys, middle, top_k)
        width = next(w for w in (4, 8, 16) if w >= group_size)
        sizes = {"head_dim": head_dim, "num_subspaces": num_subspaces, "num_centroids": num_centroids, "width": width}
        for name, size in sizes.items():
            told[name] = size
        told["softmax_scale"] = softmax_scale
        told["products"] = scratch((num_heads, num_subspaces, num_centroids, width), np.float32)
        told["powers"] = scratch((num_heads, told["worth"].shape[1], width), np.float32)
        for name in ("shifts", "totals"):
            told[name] = scratch((num_heads, num_ranges(num_keys), LANES), np.float32)
        pieces = num_heads * num_ranges(num_keys)
        self.tape = Tape()
        self.tape.add(multiply_stage, told.words, num_heads * num_subspaces)
        self.tape.add(look_up_stage, told.words, pieces)
        self.tape.add(settle_stage, told.words, num_heads)
        self.tape.add(share_stage, told.words, pieces)
        add_choice(self.tape, told, num_heads, num_keys)


def multiply_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Scaled products of a group's queries with the centroids of one subspace."""
    pq = pq_at(arguments)
    head, b = piece // pq.num_subspaces, piece % pq.num_subspaces
    dim, num_centroids, width = pq.head_dim // pq.num_subspaces, pq.num_centroids, pq.width
    q = array_at(pq.q + 4 * head * pq.group_size * pq.head_dim, pq.group_size * pq.head_dim, np.float32(0))
    centroids = array_at(pq.centroids + 4 * piece * num_centroids * dim, num_centroids * dim, np.float32(0))
    products = array_at(pq.products + 4 * piece * num_centroids * width, num_centroids * width, np.float32(0))
    scale = np.float32(pq.softmax_scale)
    for c in range(num_centroids):
        for g in range(pq.group_size):
            sums = fill(F32x16, 0.0)
            for i in range(0, dim, LANES):
                sums = fma(load(F32x16, q, g * pq.head_dim + b * dim + i), load(F32x16, centroids, c * dim + i), sums)
            products[c * width + g] = sum_of(sums) * scale
    return 0


def look_up_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Logits of the keys of a range, turned into powers: what is largest is taken away first."""
    pq = pq_at(arguments)
    head, number = piece // pq.num_ranges, piece % pq.num_ranges
    first, width = number * RANGE_KEYS, pq.width
    num_keys = min(RANGE_KEYS, pq.num_keys - first)
    size = pq.num_subspaces * pq.num_centroids * width
    products = array_at(pq.products + 4 * head * size, size, np.float32(0))
    at = (head * pq.num_keys + first) * pq.num_subspaces
    codes = array_at(pq.codes + at, num_keys * pq.num_subspaces, np.uint8(0))
    place = 4 * (head * pq.stride + first) * width
    powers = array_at(pq.powers + place, -(-num_keys * width // LANES) * LANES, np.float32(0))
    shifts = array_at(pq.shifts + 4 * piece * LANES, LANES, np.float32(0))
    totals = array_at(pq.totals + 4 * piece * LANES, LANES, np.float32(0))
    if width == 4 and pq.num_subspaces == 2:
        _look_up_pairs(codes, products, pq.num_centroids * 4, num_keys, powers, shifts)
    else:
        _look_up(codes, products, pq.num_subspaces, pq.num_centroids, width, num_keys, powers, shifts)
    _raise_powers(powers, shifts, totals, num_keys * width, width)
    return 0


def settle_stage(arguments: int, head: int, thread: int, unused: int) -> int:
    """From the ranges' largest logits and sums to what makes shares of their powers."""
    pq = pq_at(arguments)
    size = pq.num_ranges * LANES
    shifts = array_at(pq.shifts + 4 * head * size, size, np.float32(0))
    totals = array_at(pq.totals + 4 * head * size, size, np.float32(0))
    for g in range(LANES):
        if g >= pq.group_size:
            for i in range(g, size, LANES):
                totals[i] = 0.0
            continue
        top, total = np.float32(-np.inf), 0.0
        for i in range(g, size, LANES):
            top = max(top, shifts[i])
        for i in range(g, size, LANES):
            total += totals[i] * np.exp(np.float64(shifts[i] - top))
        for i in range(g, size, LANES):
            totals[i] = np.exp(np.float64(shifts[i] - top)) / total
    return 0


def share_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """What keys of a range are worth: their softmax shares, summed over the group."""
    pq = pq_at(arguments)
    head, number = piece // pq.num_ranges, piece % pq.num_ranges
    first, width = number * RANGE_KEYS, pq.width
    num_keys = min(RANGE_KEYS, pq.num_keys - first)
    factors = array_at(pq.totals + 4 * piece * LANES, LANES, np.float32(0))
    place = 4 * (head * pq.stride + first) * width
    powers = array_at(pq.powers + place, num_keys * width, np.float32(0))
    # shares are positive: they order like their bits
    worth = array_at(pq.worth + 4 * (head * pq.stride + first), num_keys, np.float32(0))
    if width == 4:
        for i in range(num_keys):
            sum_01 = powers[4 * i] * factors[0] + powers[4 * i + 1] * factors[1]
            worth[i] = sum_01 + (powers[4 * i + 2] * factors[2] + powers[4 * i + 3] * factors[3])
    else:
        for i in range(num_keys):
            total = np.float32(0.0)
            for g in range(pq.group_size):
                total += powers[width * i + g] * factors[g]
            worth[i] = total
    return 0


@exact_kernel
def _look_up_pairs(
    codes: NDArray[np.uint8],
    products: NDArray[np.float32],
    second: int,  # where the second subspace's products begin
    num_keys: int,
    logits: NDArray[np.float32],
    shifts: NDArray[np.float32],
) -> None:
    """`_look_up` for groups of up to 4 and two subspaces."""
    top = load(F32x4, products, 4 * np.int64(codes[0])) + load(F32x4, products, second + 4 * np.int64(codes[1]))
    for key in range(num_keys):
        a = load(F32x4, products, 4 * np.int64(codes[2 * key]))
        logit = a + load(F32x4, products, second + 4 * np.int64(codes[2 * key + 1]))
        store(logits, 4 * key, logit)
        top = larger(top, logit)
    store(shifts, 0, top)


@exact_kernel
def _look_up(
    codes: NDArray[np.uint8],  # [num_keys, num_subspaces]
    products: NDArray[np.float32],  # [num_subspaces, num_centroids, width]
    num_subspaces: int,
    num_centroids: int,
    width: int,
    num_keys: int,
    logits: NDArray[np.float32],  # [num_keys, width], written
    shifts: NDArray[np.float32],  # [at least width], written: their maxima
) -> None:
    for v in range(0, width, 4):
        top = fill(F32x4, NOTHING)
        for key in range(num_keys):
            logit = fill(F32x4, 0.0)
            for b in range(num_subspaces):
                code = b * num_centroids + np.int64(codes[num_subspaces * key + b])
                logit += load(F32x4, products, code * width + v)
            store(logits, width * key + v, logit)
            top = larger(top, logit)
        store(shifts, v, top)


@exact_kernel
def _raise_powers(
    powers: NDArray[np.float32],  # logits come in, with room up to a multiple of LANES
    shifts: NDArray[np.float32],
    totals: NDArray[np.float32],  # [LANES], written
    num_logits: int,
    width: int,
) -> None:
    shift, sums = np.empty(LANES, np.float32), fill(F32x16, 0.0)
    for i in range(LANES):
        shift[i] = shifts[i % width]
    for i in range(num_logits, len(powers)):
        powers[i] = NOTHING
    taken = load(F32x16, shift, 0)
    for i in range(0, num_logits, LANES):
        power = exp_lanes(load(F32x16, powers, i) - taken)
        store(powers, i, power)
        sums += power
    store(shift, 0, sums)
    for i in range(width, LANES):
        shift[i % width] += shift[i]
    for i in range(LANES):
        totals[i] = shift[i] if i < width else 0.0
