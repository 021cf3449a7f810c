"""The definition of the sketch, in numpy: slow, obviously right, and what every faster version must meet.

A transform belongs to one KV head and one segment of its rows. With queries q of the group and keys k of the segment,
let A be the root of the unit queries' mean of q q^T, and V the eigenvectors of A Cov(k) A, largest first. Then

    q . k  =  q . mean(k)  +  (q A^-1 V) . ((k - mean(k)) A V),

and eigenvalue j is what coordinate j adds to the variance of a logit, as the context's own queries see it: the
Karhunen-Loeve transform under the queries' metric. The first coordinates are kept in 4 bits each, those that follow in
2. A code u stands for the odd number c = 2 u - (2^bits - 1), in units of half a step.

Values are predicted from the codes by linear regression: v is about mean(v) + (c - mean(c)) @ B.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.sketch.codes import FINE_BITS, FINE_CODES, coord_bits, unpack_codes
from csattn.sketch.index import SketchIndex

Floats = NDArray[np.float64]

LEAST_QUERY_ENERGY = 1e-6  # of a direction, as a share of the greatest: A has to be inverted
LEAST_KEY_ENERGY = 1e-12  # of a coordinate, likewise: below, its codes say nothing and count nothing
RIDGE = 1e-3  # of the regression, as a share of the codes' mean variance
# in units of a coordinate's deviation: the step that is best for a normal distribution, by the bits; of these multiples
# of it, that with the least squared error on the segment's rows is taken
NORMAL_STEP = {2: 0.996, 4: 0.335}
STEP_MULTIPLES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
STEP_SAMPLES = 2048  # at most so many rows, evenly spaced, decide about the steps

KEY_BITS, TRANSFORM_BITS = 20, 24  # fixed point: with 256 dimensions, sums of products fit a float64's 53 bits
LARGEST_MULTIPLIER = 127  # of a code: a query's coordinate becomes an 8-bit integer
SCORE_ROOM = 32700.0  # of an int16 score, before what is set aside for the rounding of multipliers


@dataclass(frozen=True, slots=True)
class Transform:
    """Of one KV head's rows in one segment."""

    key_mean: NDArray[np.float32]  # [head_dim]
    key_exponent: int  # |k - key_mean| <= 2**key_exponent in the rows that it was fitted to
    key_transform: NDArray[np.float32]  # [head_dim, num_coords]: from k - key_mean to steps; columns in fixed point
    query_transform: NDArray[np.float16]  # [head_dim, num_coords]: q @ this is what a unit of c adds to q . k
    value_mean: NDArray[np.float32]  # [head_dim]
    # [num_coords, head_dim]: B; its coarse rows times the variance of c. What the mean of coarse codes tells is in
    # value_mean already: see `attend_rest`
    value_transform: NDArray[np.float16]


def fit(
    q: NDArray[np.float32],  # [num_queries, head_dim], of all of the group's heads
    k: NDArray[np.float32],  # [num_rows, head_dim], at least one
    v: NDArray[np.float32],  # [num_rows, head_dim]
    bits: NDArray[np.int64],  # [num_coords]: see `codes.coord_bits`
) -> Transform:
    """The transform of these rows, as these queries see them."""
    root, inverse = _query_metric(q.astype(np.float64))
    mean = k.astype(np.float64).mean(0)
    centred = k - mean
    energies, directions = np.linalg.eigh(root @ (centred.T @ centred / len(k)) @ root)
    energy, basis = energies[::-1][: len(bits)], directions[:, ::-1][:, : len(bits)]
    deviation = np.sqrt(np.where(energy > LEAST_KEY_ENERGY * energy[0], energy, 0.0).clip(0.0))
    samples = centred[:: -(-len(k) // STEP_SAMPLES)] @ root @ basis
    step = np.array([_best_step(samples[:, j], deviation[j], int(of)) for j, of in enumerate(bits)])
    per_step = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
    key_mean = mean.astype(np.float32)
    largest = np.abs(k.astype(np.float64) - key_mean).max()
    exponent = int(np.ceil(np.log2(largest))) if largest > 0 else 0
    key_transform = in_fixed_point(root @ basis * per_step)
    c = signed(encode(k, key_mean, exponent, key_transform, bits), bits)
    is_fine = bits == FINE_BITS
    matrix = _regression(c, v.astype(np.float64))
    value_mean = v.astype(np.float64).mean(0) - np.where(is_fine, c.mean(0), 0.0) @ matrix
    value_transform = matrix * np.where(is_fine, 1.0, c.var(axis=0))[:, None]
    return Transform(
        key_mean,
        exponent,
        key_transform,
        _half(inverse @ basis * (step / 2)),
        value_mean.astype(np.float32),
        _half(value_transform),
    )


def encode(
    k: NDArray[np.float32],  # [num_rows, head_dim]
    key_mean: NDArray[np.float32],
    key_exponent: int,
    key_transform: NDArray[np.float32],
    bits: NDArray[np.int64],  # [num_coords]
) -> NDArray[np.uint8]:
    """Codes u [num_rows, num_coords]: the same to the bit on every machine, whatever the order of sums.

    Keys in fixed point have KEY_BITS bits, the transform's columns TRANSFORM_BITS: float64 sums of their products
    are exact.
    """
    unit = 2.0 ** (key_exponent - KEY_BITS)
    x = np.rint((k.astype(np.float64) - key_mean) / unit).clip(-(2**KEY_BITS), 2**KEY_BITS) * unit
    steps = np.floor(x @ key_transform.astype(np.float64))
    codes: NDArray[np.uint8] = (steps + 2 ** (bits - 1)).clip(0, 2**bits - 1).astype(np.uint8)
    return codes


def signed(codes: NDArray[np.uint8], bits: NDArray[np.int64]) -> Floats:
    """The odd numbers c that codes stand for."""
    odd: Floats = 2.0 * codes - (2.0**bits - 1)
    return odd


def score_head(
    q: NDArray[np.float32],  # [head_dim]
    index: SketchIndex,
    head: int,
) -> tuple[float, float, NDArray[np.int16]]:
    """base, unit and scores [context_len]: q . k is about base + unit * score.

    All segments share the unit and the base, which is the first segment's q . key_mean: the others' scores are shifted
    by what theirs differ. Multipliers are such that a score fits 16 bits whatever the codes.
    """
    means, coordinates = project(q, index, head)
    bits = coord_bits(index.num_fine, index.num_coarse)
    unit, multipliers, shifts = integer_query(means, coordinates, bits)
    c = signed(unpack_codes(index.codes[head], index.context_len, index.num_fine), bits).astype(np.int64)
    scores = np.empty(index.context_len, np.int64)
    for number in range(index.num_segments):
        rows = index.segment(number)
        scores[rows] = c[rows] @ multipliers[number] + shifts[number]
    assert (np.abs(scores) <= 32767).all()
    return float(means[0]), unit, scores.astype(np.int16)


def project(q: NDArray[np.float32], index: SketchIndex, head: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """q . key_mean [num_segments] and q's coordinates [num_segments, num_coords] in the segments of a head.

    Sums run in index order in float64, where products of such numbers are exact, and are rounded to float32.
    """
    means = np.array([_dot_in_order(q, mean[:, None])[0] for mean in index.key_mean[head]])
    coordinates = np.array([_dot_in_order(q, transform) for transform in index.query_transform[head]])
    return means.astype(np.float32), coordinates.astype(np.float32)


def integer_query(
    means: NDArray[np.float32],  # [num_segments]
    coordinates: NDArray[np.float32],  # [num_segments, num_coords]
    bits: NDArray[np.int64],  # [num_coords]
) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
    """unit, multipliers [num_segments, num_coords] and shifts [num_segments]; all 0 where a query is not finite.

    Sums run in index order. Rounding adds at most one half to each number that a score is made of: that is set aside.
    """
    p, shift = coordinates.astype(np.float64), means.astype(np.float64) - np.float64(means[0])
    largest = 2.0**bits - 1
    room = SCORE_ROOM - largest.sum() / 2
    unit = 0.0
    for of_segment, offset in zip(np.abs(p), np.abs(shift), strict=True):
        total = float(np.add.accumulate(largest * of_segment)[-1]) + offset
        unit = max(unit, float(of_segment.max()) / LARGEST_MULTIPLIER, total / room)
    if not (0.0 < unit < np.inf and np.isfinite(shift).all()):
        return 0.0, np.zeros(p.shape, np.int64), np.zeros(len(p), np.int64)
    return unit, np.rint(p / unit).astype(np.int64), np.rint(shift / unit).astype(np.int64)


def attend_rest(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: SketchIndex,
    is_rest: NDArray[np.bool_],  # [num_kv_heads, context_len]: the rows to attend to by their codes
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention to rows by their codes: out like q and lse [num_q_heads]; zeros and -inf where there are none.

    Of a segment, the weighted mean of the values follows that of the codes. Of fine codes it is measured. Of coarse
    ones it is told from the query: weighing by e^logit moves the mean of a normal c by its variance times the slope.
    """
    out, lse = np.zeros(q.shape, np.float32), np.full(len(q), -np.inf, np.float32)
    num_measured = FINE_CODES * index.num_fine
    bits = coord_bits(index.num_fine, index.num_coarse)
    for row in range(len(q)):
        head = row * index.num_heads // len(q)
        if not is_rest[head].any():
            continue
        base, unit, scores = score_head(q[row], index, head)
        logits = np.where(is_rest[head], softmax_scale * (base + unit * scores.astype(np.float64)), -np.inf)
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        lse[row] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        c = signed(unpack_codes(index.codes[head], index.context_len, index.num_fine), bits)[:, :num_measured]
        slopes = softmax_scale * project(q[row], index, head)[1][:, num_measured:].astype(np.float64)
        for number in range(index.num_segments):
            of_segment = weights[index.segment(number)]
            share = of_segment.sum()
            codes = np.concatenate([of_segment @ c[index.segment(number)], share * slopes[number]])
            out[row] += share * index.value_mean[head, number] + codes @ index.value_transform[head, number]
    return out, lse


def in_fixed_point(columns: Floats) -> NDArray[np.float32]:
    """Each column rounded to multiples of a power of two, such that TRANSFORM_BITS bits hold its largest."""
    largest = np.abs(columns).max(axis=0)
    unit = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1.0))) - TRANSFORM_BITS)
    rounded: NDArray[np.float32] = (np.rint(columns / unit) * unit).astype(np.float32)
    return rounded


def _half(x: Floats) -> NDArray[np.float16]:
    """Rounded to float16; what is too large for it, to its largest."""
    limit = float(np.finfo(np.float16).max)
    rounded: NDArray[np.float16] = x.clip(-limit, limit).astype(np.float16)
    return rounded


def _query_metric(q: Floats) -> tuple[Floats, Floats]:
    """The root of the mean of q q^T over unit queries, and its inverse. Queries of zeros count nothing."""
    norm = np.sqrt((q * q).sum(axis=1, keepdims=True))
    unit = np.divide(q, norm, out=np.zeros_like(q), where=norm > 0)
    energy, directions = np.linalg.eigh(unit.T @ unit / len(q))
    if not energy[-1] > 0:
        return np.eye(q.shape[1]), np.eye(q.shape[1])
    root = np.sqrt(energy.clip(LEAST_QUERY_ENERGY * energy[-1]))
    return directions * root @ directions.T, directions / root @ directions.T


def _best_step(samples: Floats, deviation: float, bits: int) -> float:
    """The step that loses least of a coordinate; 0 where it has no energy."""
    if deviation == 0:
        return 0.0
    half = 2 ** (bits - 1)
    steps = [deviation * NORMAL_STEP[bits] * multiple for multiple in STEP_MULTIPLES]
    errors = [
        np.square(samples - step * (np.floor(samples / step).clip(-half, half - 1) + 0.5)).mean() for step in steps
    ]
    return steps[int(np.argmin(errors))]


def _regression(c: Floats, v: Floats) -> Floats:
    """B [num_coords, head_dim]: v - mean(v) is about (c - mean(c)) @ B, with the least squared error, nearly."""
    x = c - c.mean(0)
    gram = x.T @ x
    gram += (RIDGE * gram.trace() / len(gram) + 1e-9 * len(c)) * np.eye(len(gram))
    return np.linalg.solve(gram, x.T @ (v - v.mean(0)))


def _dot_in_order(x: NDArray[np.float32], columns: NDArray[np.floating]) -> Floats:
    """x [n] times columns [n, m], as float64 sums in index order."""
    sums: Floats = np.add.accumulate(x.astype(np.float64)[:, None] * columns.astype(np.float64), axis=0)[-1]
    return sums
