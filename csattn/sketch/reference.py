"""The definition of the sketch, in numpy: slow, obviously right, and what every faster version must meet.

A transform belongs to one KV head and one segment of its rows. With queries q of the group and keys k of the segment,
let A be the root of the unit queries' mean of q q^T, and V the eigenvectors of A Cov(k) A, largest first. Then

    q . k  =  q . mean(k)  +  (q A^-1 V) . ((k - mean(k)) A V),

and eigenvalue j is what coordinate j adds to the variance of a logit, as the context's own queries see it: the
Karhunen-Loeve transform under the queries' metric. The first `num_coords` coordinates are kept, in `bits` bits each.
A code u stands for the odd number c = 2 u - (2^bits - 1), in units of half a step.

Values are told from the codes of the first `num_values` coordinates by linear regression: v is about
value_mean + c[:num_values] @ value_transform.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.sketch.codes import CODE_BITS, unpack_codes
from csattn.sketch.index import SketchIndex

Floats = NDArray[np.float64]

LEAST_QUERY_ENERGY = 1e-6  # of a direction, as a share of the greatest: A has to be inverted
LEAST_KEY_ENERGY = 1e-12  # of a coordinate, likewise: below, its codes say nothing and count nothing
RIDGE = 1e-3  # of the regression, as a share of the codes' mean variance
# a step in units of the coordinate's deviation; that with the least squared error on the segment's rows is taken
STEPS = {4: tuple(0.335 * factor for factor in (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0))}
STEP_SAMPLES = 4096  # at most so many rows, evenly spaced, decide about the steps

KEY_BITS, TRANSFORM_BITS = 20, 24  # fixed point: with 256 dimensions, sums of products fit a float64's 53 bits
LARGEST_MULTIPLIER = 127  # of a code: a query's coordinate becomes an 8-bit integer
SCORE_ROOM = 32700.0  # of an int16 score: what is left once each multiplier may be rounded up by one half


@dataclass(frozen=True, slots=True)
class Transform:
    """Of one KV head's rows in one segment."""

    key_mean: NDArray[np.float32]  # [head_dim]
    key_exponent: int  # |k - key_mean| <= 2**key_exponent in the rows that it was fitted to
    key_transform: NDArray[np.float32]  # [head_dim, num_coords]: from k - key_mean to steps; columns in fixed point
    query_transform: NDArray[np.float32]  # [head_dim, num_coords]: q @ this is what a unit of c adds to q . k
    value_mean: NDArray[np.float32]  # [head_dim]
    value_transform: NDArray[np.float32]  # [num_values, head_dim]


def fit(
    q: NDArray[np.float32],  # [num_queries, head_dim], of all of the group's heads
    k: NDArray[np.float32],  # [num_rows, head_dim], at least one
    v: NDArray[np.float32],  # [num_rows, head_dim]
    num_coords: int,
    num_values: int,
    bits: int = CODE_BITS,
) -> Transform:
    """The transform of these rows, as these queries see them."""
    root, inverse = _query_metric(q.astype(np.float64))
    mean = k.astype(np.float64).mean(0)
    centred = k - mean
    energy, basis = np.linalg.eigh(root @ (centred.T @ centred / len(k)) @ root)
    energy, basis = energy[::-1][:num_coords], basis[:, ::-1][:, :num_coords]
    deviation = np.sqrt(np.where(energy > LEAST_KEY_ENERGY * energy[0], energy, 0.0).clip(0.0))
    samples = centred[:: -(-len(k) // STEP_SAMPLES)] @ root @ basis
    step = np.array([_best_step(samples[:, j], deviation[j], bits) for j in range(num_coords)])
    per_step = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
    key_mean = mean.astype(np.float32)
    largest = np.abs(k.astype(np.float64) - key_mean).max()
    exponent = int(np.ceil(np.log2(largest))) if largest > 0 else 0
    key_transform = in_fixed_point(root @ basis * per_step)
    c = signed(encode(k, key_mean, exponent, key_transform, bits), bits)
    value_mean, value_transform = _regression(c[:, :num_values], v.astype(np.float64))
    return Transform(
        key_mean,
        exponent,
        key_transform,
        (inverse @ basis * (step / 2)).astype(np.float32),
        value_mean.astype(np.float32),
        value_transform.astype(np.float32),
    )


def encode(
    k: NDArray[np.float32],  # [num_rows, head_dim]
    key_mean: NDArray[np.float32],
    key_exponent: int,
    key_transform: NDArray[np.float32],
    bits: int = CODE_BITS,
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


def signed(codes: NDArray[np.uint8], bits: int = CODE_BITS) -> Floats:
    """The odd numbers c that codes stand for."""
    odd: Floats = 2.0 * codes - (2**bits - 1)
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
    unit, multipliers, shifts = integer_query(means, coordinates)
    codes = unpack_codes(index.codes[head], index.context_len, index.num_coords)
    scores = np.empty(index.context_len, np.int64)
    for number in range(index.num_segments):
        rows = index.segment(number)
        scores[rows] = signed(codes[rows]).astype(np.int64) @ multipliers[number] + shifts[number]
    assert (np.abs(scores) <= 32767).all()
    return float(means[0]), unit, scores.astype(np.int16)


def project(q: NDArray[np.float32], index: SketchIndex, head: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """q . key_mean [num_segments] and q's coordinates [num_segments, num_coords] in the segments of a head.

    Sums run in index order in float64, where products of float32 are exact, and are rounded to float32.
    """
    means = np.array([_dot_in_order(q, mean[:, None])[0] for mean in index.key_mean[head]])
    coordinates = np.array([_dot_in_order(q, transform) for transform in index.query_transform[head]])
    return means.astype(np.float32), coordinates.astype(np.float32)


def integer_query(
    means: NDArray[np.float32],  # [num_segments]
    coordinates: NDArray[np.float32],  # [num_segments, num_coords]
) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
    """unit, multipliers [num_segments, num_coords] and shifts [num_segments]; all 0 where a query is not finite.

    Rounding adds at most one half to each number that a score is made of, which SCORE_ROOM sets aside.
    """
    p, shift = coordinates.astype(np.float64), means.astype(np.float64) - np.float64(means[0])
    num_coords = p.shape[1]
    room = SCORE_ROOM - (2**CODE_BITS - 1) * num_coords / 2
    unit = 0.0
    for of_segment, offset in zip(np.abs(p), np.abs(shift), strict=True):
        total = (2**CODE_BITS - 1) * float(np.add.accumulate(of_segment)[-1]) + offset
        unit = max(unit, float(of_segment.max()) / LARGEST_MULTIPLIER, total / room)
    if not 0.0 < unit < np.inf:
        return 0.0, np.zeros(p.shape, np.int64), np.zeros(len(p), np.int64)
    return unit, np.rint(p / unit).astype(np.int64), np.rint(shift / unit).astype(np.int64)


def attend_rest(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: SketchIndex,
    is_rest: NDArray[np.bool_],  # [num_kv_heads, context_len]: the rows to attend to by their codes
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention to rows by their codes: out like q and lse [num_q_heads]; zeros and -inf where there are none."""
    out, lse = np.zeros(q.shape, np.float32), np.full(len(q), -np.inf, np.float32)
    for row in range(len(q)):
        head = row * index.num_heads // len(q)
        if not is_rest[head].any():
            continue
        base, unit, scores = score_head(q[row], index, head)
        logits = np.where(is_rest[head], softmax_scale * (base + unit * scores.astype(np.float64)), -np.inf)
        weights = np.exp(logits - logits.max())
        total = weights.sum()
        values = coded_values(index, head)
        out[row] = weights @ values / total
        lse[row] = logits.max() + np.log(total)
    return out, lse


def coded_values(index: SketchIndex, head: int) -> Floats:
    """What the codes say of each row's value: [context_len, head_dim]."""
    c = signed(unpack_codes(index.codes[head], index.context_len, index.num_coords))[:, : index.num_values]
    values = np.empty((index.context_len, index.head_dim))
    for number in range(index.num_segments):
        rows = index.segment(number)
        values[rows] = index.value_mean[head, number] + c[rows] @ index.value_transform[head, number].astype(np.float64)
    return values


def in_fixed_point(columns: Floats) -> NDArray[np.float32]:
    """Each column rounded to multiples of a power of two, such that TRANSFORM_BITS bits hold its largest."""
    largest = np.abs(columns).max(axis=0)
    unit = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1.0))) - TRANSFORM_BITS)
    rounded: NDArray[np.float32] = (np.rint(columns / unit) * unit).astype(np.float32)
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
    steps = [deviation * step for step in STEPS[bits]]
    errors = [
        np.square(samples - step * (np.floor(samples / step).clip(-half, half - 1) + 0.5)).mean() for step in steps
    ]
    return steps[int(np.argmin(errors))]


def _regression(c: Floats, v: Floats) -> tuple[Floats, Floats]:
    """value_mean [head_dim] and value_transform [num_values, head_dim] with the least squared error, nearly."""
    c_mean, v_mean = c.mean(0), v.mean(0)
    x = c - c_mean
    gram = x.T @ x
    gram += (RIDGE * gram.trace() / len(gram) + 1e-9 * len(c)) * np.eye(len(gram))
    matrix = np.linalg.solve(gram, x.T @ (v - v_mean))
    return v_mean - c_mean @ matrix, matrix


def _dot_in_order(x: NDArray[np.float32], columns: NDArray[np.float32]) -> Floats:
    """x [n] times columns [n, m], as float64 sums in index order."""
    sums: Floats = np.add.accumulate(x.astype(np.float64)[:, None] * columns.astype(np.float64), axis=0)[-1]
    return sums
