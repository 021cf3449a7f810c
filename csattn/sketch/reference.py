"""The definition of the sketch, in numpy: slow, obviously right, and what every faster version must meet.

A transform belongs to one KV head and one segment of its rows. Let q be a sample of the group's queries from all
segments, k the keys of this segment, A the square root of the mean of q q^T over unit queries, and V the eigenvectors
of A Cov(k) A, largest first. Then

    q . k  =  q . mean(k)  +  (q A^-1 V) . ((k - mean(k)) A V),

and eigenvalue j is what coordinate j adds to the variance of a logit, as the context's own queries see it: the
Karhunen-Loeve transform under the queries' metric. The first coordinates are kept in 4 bits each, the next ones in 2
bits. A code u = 0, 1, ... of that many bits stands for u - (2^bits - 1) / 2 quantization steps.

Values are predicted from the codes by linear regression: v is about mean(v) + (u - mean(u)) @ B.

Logits are in octaves here, softmax_scale * log2(e) * q . k, and weights are powers of two. Scores are integers, in a
unit that is a power of two of octaves, so every machine makes the same choice.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.sketch.codes import FINE_BITS, FINE_CODES, coord_bits, unpack_codes
from csattn.sketch.index import MARKED_SHARE, SketchIndex

Floats = NDArray[np.float64]

QUERIES_PER_DIM = 64  # a KV head's sample has at most so many queries per dimension, evenly spaced; more change nothing
LEAST_QUERY_ENERGY = 1e-6  # lower bound of the eigenvalues of A^2, as a share of the largest: A has to be inverted
LEAST_KEY_ENERGY = 1e-6  # a coordinate with a smaller share of the largest energy has a step of 0 and adds nothing
LEAST_ENERGY = 2.0**-84  # the same, absolute: below it a step underflows in float16, and the energy soon in float32
LARGEST_NUMBER = 2.0**50  # of queries, keys and values: sums of squares over many rows and dimensions fit a float32
RIDGE = 1e-3  # of the regression, in units of (mean variance of the codes + 1)
# The best step for a normal distribution, in standard deviations of the coordinate, by the number of bits. Of these
# multiples of it, the one with the least squared error on the segment's rows is used.
NORMAL_STEP = {2: 0.996, 4: 0.335}
STEP_MULTIPLES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
STEP_SAMPLES = 2048  # rows that the steps are fitted to, at most, evenly spaced

KEY_BITS, TRANSFORM_BITS = 20, 24  # fixed point: with 512 dimensions, sums of products are at most 2**53, and exact
LARGEST_MULTIPLIER = 127  # a query's coordinate becomes an 8-bit integer, which multiplies a code
SCORE_ROOM = 32700.0  # range of an int16 score, before the reserve for the rounding of multipliers is subtracted
LARGEST_EXPONENT = 15  # the unit of scores is 2**-15, 2**-14, ... or 2**15 octaves
NORMALISER_KEYS, LEAST_OCTAVE = 8, -32  # see `normaliser`
TOTAL_BITS = 24  # the largest weight counts as 2**24 in the total of weights
LOG_BITS = 16  # fractional bits of the total's logarithm
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Transform:
    """The transform of one KV head's rows in one segment."""

    key_mean: NDArray[np.float32]  # [head_dim]
    key_exponent: int  # |k - key_mean| <= 2**key_exponent in the rows that it was fitted to
    key_transform: NDArray[np.float32]  # [head_dim, num_coords]: from k - key_mean to steps; columns in fixed point
    query_transform: NDArray[np.float16]  # [head_dim, num_coords]: q @ this is what one step adds to q . k
    value_mean: NDArray[np.float32]  # [head_dim]
    # [num_coords, head_dim]: B, with its coarse rows multiplied by the variance of u. The contribution of the mean
    # coarse codes is part of value_mean: see `attend_rest`
    value_transform: NDArray[np.float16]
    marked: NDArray[np.int64]  # ascending: the rows whose keys the codes reproduce worst


def fit(
    q: NDArray[np.float32],  # [num_queries, head_dim], of all heads of the group
    k: NDArray[np.float32],  # [num_rows, head_dim], at least one
    v: NDArray[np.float32],  # [num_rows, head_dim]
    bits: NDArray[np.int64],  # [num_coords]: see `codes.coord_bits`
) -> Transform:
    """Fit the transform of these rows to a sample of these queries.

    Numbers are at most LARGEST_NUMBER: builds with larger ones are refused.
    """
    assert all(np.abs(rows).max() <= LARGEST_NUMBER for rows in (q, k, v)), "a number is NaN or too large"
    root, inverse = _query_metric(q[sample_of_queries(*q.shape)].astype(np.float64))
    mean = k.astype(np.float64).mean(0)
    centred = k - mean
    energies, directions = np.linalg.eigh(root @ (centred.T @ centred / len(k)) @ root)
    energy, basis = energies[::-1][: len(bits)], directions[:, ::-1][:, : len(bits)]
    deviation = np.sqrt(np.where(energy > max(LEAST_KEY_ENERGY * energy[0], LEAST_ENERGY), energy, 0.0))
    samples = centred[:: -(-len(k) // STEP_SAMPLES)] @ root @ basis
    step = np.array([_best_step(samples[:, j], deviation[j], int(of)) for j, of in enumerate(bits)])
    per_step = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
    key_mean = mean.astype(np.float32)
    largest = np.abs(k.astype(np.float64) - key_mean).max()
    exponent = int(np.ceil(np.log2(largest))) if largest > 0 else 0
    key_transform = in_fixed_point(root @ basis * per_step)
    u = encode(k, key_mean, exponent, key_transform, bits).astype(np.float64)
    is_fine = bits == FINE_BITS
    matrix = _regression(u, v.astype(np.float64))
    value_mean = v.astype(np.float64).mean(0) - np.where(is_fine, u.mean(0), 0.0) @ matrix
    value_transform = matrix * np.where(is_fine, 1.0, u.var(axis=0))[:, None]
    query_transform = _half(inverse @ basis * step)
    reconstructed = key_mean + (u - (2.0**bits - 1) / 2) @ query_transform.T.astype(np.float64)
    return Transform(
        key_mean,
        exponent,
        key_transform,
        query_transform,
        value_mean.astype(np.float32),
        _half(value_transform),
        _farthest(k - reconstructed),
    )


def sample_of_queries(num_queries: int, head_dim: int) -> slice:
    """Which of a KV head's queries (at least one) a transform is fitted to: at most QUERIES_PER_DIM * head_dim."""
    return slice(None, None, -(-num_queries // (QUERIES_PER_DIM * head_dim)))


def encode(
    k: NDArray[np.float32],  # [num_rows, head_dim]
    key_mean: NDArray[np.float32],
    key_exponent: int,
    key_transform: NDArray[np.float32],
    bits: NDArray[np.int64],  # [num_coords]
) -> NDArray[np.uint8]:
    """Return codes u [num_rows, num_coords]: the same on every machine, whatever the order of summation.

    Keys in fixed point have KEY_BITS bits and the transform's columns TRANSFORM_BITS, so float64 sums of their products
    are exact.
    """
    unit = 2.0 ** (key_exponent - KEY_BITS)
    x = np.rint((k.astype(np.float64) - key_mean) / unit).clip(-(2**KEY_BITS), 2**KEY_BITS) * unit
    steps = np.floor(x @ key_transform.astype(np.float64))
    codes: NDArray[np.uint8] = (steps + 2 ** (bits - 1)).clip(0, 2**bits - 1).astype(np.uint8)
    return codes


def score_group(
    q: NDArray[np.float32],  # [group_size, head_dim]: the query heads that share the KV head
    index: SketchIndex,
    head: int,
    softmax_scale: float,
) -> tuple[NDArray[np.float32], int, NDArray[np.int16]]:
    """Score all rows by their codes: logits in octaves are about base + 2**exponent * score.

    Returns bases [group_size], exponent and scores [group_size, context_len]. A query's base is its product with the
    key_mean of the first segment; scores in other segments include an offset for the difference of their key_mean.
    Multipliers are such that a score fits 16 bits for any codes.
    """
    means, coordinates = project(q, index, head, softmax_scale)
    exponent, multipliers, offsets = integer_queries(means, coordinates, coord_bits(index.num_fine, index.num_coarse))
    u = unpack_codes(index.codes[head], index.context_len, index.num_fine).astype(np.int64)
    scores = np.empty((len(q), index.context_len), np.int64)
    for number in range(index.num_segments):
        rows = index.segment(number)
        scores[:, rows] = multipliers[:, number] @ u[rows].T + offsets[:, number, None]
    assert (np.abs(scores) <= 32767).all()
    return means[:, 0], exponent, scores.astype(np.int16)


def project(
    q: NDArray[np.float32], index: SketchIndex, head: int, softmax_scale: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Project queries for each segment of a head; results are in octaves.

    Returns q . key_mean [group_size, num_segments], and what one step of each coordinate adds to the logit
    [group_size, num_segments, num_coords]. A q . key_mean is summed in index order in float64, where the products are
    exact, and rounded to float32. Coordinates need less precision: the query in octaves, each product and each partial
    sum are rounded to float32.
    """
    octaves, wide = softmax_scale * LOG2_E, q.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # `integer_queries` deals with what is not finite
        products = wide[:, None] * index.key_mean[head].astype(np.float64)
        means = octaves * np.add.accumulate(products, axis=2)[:, :, -1]
        columns = index.query_transform[head].astype(np.float32)
        coordinates = np.add.accumulate((octaves * wide).astype(np.float32)[:, None, :, None] * columns, axis=2)
    return means.astype(np.float32), coordinates[:, :, -1]


def integer_queries(
    means: NDArray[np.float32],  # [group_size, num_segments]
    coordinates: NDArray[np.float32],  # [group_size, num_segments, num_coords]
    bits: NDArray[np.int64],  # [num_coords]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Round projected queries to integers, in a unit of 2**exponent octaves that the group shares.

    Returns exponent, multipliers [group_size, num_segments, num_coords] and offsets of scores
    [group_size, num_segments]. The unit is the smallest power of two that is large enough for all queries of the group.
    A query that is not finite, or needs more than 2**LARGEST_EXPONENT, does not count and gets zeros.
    """
    required = np.array([required_unit(*of_query, bits) for of_query in zip(means, coordinates, strict=True)])
    fits = required <= 2.0**LARGEST_EXPONENT  # false for NaN
    largest = max(required[fits].max(initial=0.0), 2.0**-LARGEST_EXPONENT)
    fraction, exponent = np.frexp(largest)
    exponent -= fraction == 0.5  # the smallest with largest <= 2**exponent
    unit = 2.0 ** int(exponent)
    differences = means.astype(np.float64) - means[:, :1].astype(np.float64)
    multipliers = np.rint(np.where(fits[:, None, None], coordinates.astype(np.float64), 0.0) / unit).astype(np.int64)
    offsets = np.rint(np.where(fits[:, None], differences, 0.0) / unit).astype(np.int64)
    return int(exponent), multipliers, offsets - (multipliers @ (2**bits - 1) >> 1)


def required_unit(
    means: NDArray[np.float32],  # [num_segments]
    coordinates: NDArray[np.float32],  # [num_segments, num_coords]
    bits: NDArray[np.int64],  # [num_coords]
) -> float:
    """The smallest unit, in octaves, in which a query's multipliers fit 8 bits and its scores 16; NaN if there is none.

    Rounding changes each multiplier and the offset by at most one half: room is reserved for that. Sums are in index
    order.
    """
    half = (2.0**bits - 1) / 2
    room = SCORE_ROOM - half.sum() / 2
    sizes, differences = np.abs(coordinates.astype(np.float64)), np.abs(means.astype(np.float64) - np.float64(means[0]))
    required = 0.0
    for of_segment, difference in zip(sizes, differences, strict=True):
        total = np.add.accumulate(half * of_segment)[-1] + difference
        if not np.isfinite(total):
            return np.nan
        required = max(required, of_segment.max() / LARGEST_MULTIPLIER, total / room)
    return required


def group_scores(
    scores: NDArray[np.int16],  # [group_size, context_len]
    exponent: int,
    marks: NDArray[np.bool_] | None = None,  # [context_len]: rows to choose before all others
) -> NDArray[np.int64]:
    """Return each row's group score, in 16 bits: its largest share in the softmax of any query head of the group.

    A share, as a score, is the row's score minus the query's normaliser. Normalisers sum weights in whole octaves:
    choosing rows needs no more precision, and integers have the same sum in any order.
    """
    normalisers = np.array([normaliser(row, exponent) for row in scores])
    shares = scores.astype(np.int64) - (normalisers - normalisers.min())[:, None]
    best: NDArray[np.int64] = shares.max(axis=0).clip(-32767, 32767)
    return best if marks is None else np.where(marks, 32767, best)


def normaliser(scores: NDArray[np.int16], exponent: int) -> int:
    """Approximately log2 of the sum of 2**(2**exponent * score), in units of score, computed in integers.

    Of every NORMALISER_KEYS neighbouring keys only the largest score counts, in whole octaves, at least LEAST_OCTAVE.
    The logarithm is interpolated linearly between powers of two.
    """
    room = -len(scores) % NORMALISER_KEYS
    greatest = (
        np.pad(scores.astype(np.int64), (0, room), constant_values=-32768).reshape(-1, NORMALISER_KEYS).max(axis=1)
    )
    octaves = greatest >> -exponent if exponent <= 0 else greatest << exponent
    octaves = octaves.clip(min=LEAST_OCTAVE)
    top = int(octaves.max())
    total = int((1 << TOTAL_BITS >> (top - octaves).clip(max=TOTAL_BITS + 1)).sum())
    whole = total.bit_length() - 1
    log = (top + whole - TOTAL_BITS << LOG_BITS) + (total >> whole - LOG_BITS) - 2**LOG_BITS
    return int(log >> LOG_BITS + exponent)


def attend_rest(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: SketchIndex,
    is_rest: NDArray[np.bool_],  # [num_kv_heads, context_len]: the rows to attend to by their codes
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attend to rows by their codes: out like q and lse [num_q_heads]; 0 and -inf for heads without such rows.

    In each segment, the weighted mean of the values is predicted from the weighted mean of the codes. The mean of the
    fine codes is computed from the rows. That of the coarse codes is predicted from the query: weighting by e^logit
    shifts the mean of a normal u by its variance times the slope.
    """
    out, lse = np.zeros(q.shape, np.float32), np.full(len(q), -np.inf, np.float32)
    group_size, num_measured = len(q) // index.num_heads, FINE_CODES * index.num_fine
    for head in np.flatnonzero(is_rest.any(axis=1)).tolist():
        rows = slice(head * group_size, (head + 1) * group_size)
        bases, exponent, scores = score_group(q[rows], index, head, softmax_scale)
        coordinates = project(q[rows], index, head, softmax_scale)[1]
        u = unpack_codes(index.codes[head], index.context_len, index.num_fine)[:, :num_measured].astype(np.float64)
        for g in range(group_size):
            logits = np.where(is_rest[head], bases[g] + 2.0**exponent * scores[g], -np.inf) / LOG2_E
            weights = np.exp(logits - logits.max())
            lse[rows][g] = logits.max() + np.log(weights.sum())
            weights /= weights.sum()
            slopes = coordinates[g, :, num_measured:].astype(np.float64) / LOG2_E
            for number in range(index.num_segments):
                of_segment = weights[index.segment(number)]
                share = of_segment.sum()
                codes = np.concatenate([of_segment @ u[index.segment(number)], share * slopes[number]])
                values = codes @ index.value_transform[head, number]
                out[rows][g] += share * index.value_mean[head, number] + values
    return out, lse


def in_fixed_point(columns: Floats) -> NDArray[np.float32]:
    """Round each column to multiples of a power of two, such that TRANSFORM_BITS bits hold its largest number."""
    largest = np.abs(columns).max(axis=0)
    unit = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1.0))) - TRANSFORM_BITS)
    rounded: NDArray[np.float32] = (np.rint(columns / unit) * unit).astype(np.float32)
    return rounded


def _half(x: Floats) -> NDArray[np.float16]:
    """Round to float16; numbers out of its range become its largest."""
    limit = float(np.finfo(np.float16).max)
    rounded: NDArray[np.float16] = x.clip(-limit, limit).astype(np.float16)
    return rounded


def _query_metric(q: Floats) -> tuple[Floats, Floats]:
    """The square root of the mean of q q^T over unit queries, and its inverse. Queries that are 0 add nothing."""
    norm = np.sqrt((q * q).sum(axis=1, keepdims=True))
    unit = np.divide(q, norm, out=np.zeros_like(q), where=norm > 0)
    energy, directions = np.linalg.eigh(unit.T @ unit / len(q))
    if not energy[-1] > 0:
        return np.eye(q.shape[1]), np.eye(q.shape[1])
    root = np.sqrt(energy.clip(LEAST_QUERY_ENERGY * energy[-1]))
    return directions * root @ directions.T, directions / root @ directions.T


def _farthest(errors: Floats) -> NDArray[np.int64]:
    """The rows of errors [num_rows, head_dim] with the largest squared norms (in float32; of equal ones the first).

    Rows are in ascending order. All directions count equally: a request's queries may be unlike the context's own, and
    must not miss what the codes lose.
    """
    order = np.argsort(-np.square(errors.astype(np.float32)).sum(axis=1), kind="stable")
    return np.sort(order[: len(errors) // MARKED_SHARE])


def _best_step(samples: Floats, deviation: float, bits: int) -> float:
    """The step with the least squared error for a coordinate; 0 if it has no energy."""
    if deviation == 0:
        return 0.0
    half = 2 ** (bits - 1)
    steps = [deviation * NORMAL_STEP[bits] * multiple for multiple in STEP_MULTIPLES]
    errors = [
        np.square(samples - step * (np.floor(samples / step).clip(-half, half - 1) + 0.5)).mean() for step in steps
    ]
    return steps[int(np.argmin(errors))]


def _regression(u: Floats, v: Floats) -> Floats:
    """Ridge regression: B [num_coords, head_dim] such that v - mean(v) is about (u - mean(u)) @ B."""
    x = u - u.mean(0)
    gram = x.T @ x
    gram += RIDGE * (gram.trace() / len(gram) + len(u)) * np.eye(len(gram))
    return np.linalg.solve(gram, x.T @ (v - v.mean(0)))
