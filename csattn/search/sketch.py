"""The fields of a sketch that kernels read, and what they compute from a group's queries before they read codes.

Every sum runs in index order: in float64, where products of the inputs are exact, or for coordinates in float32, where
each product and each sum is rounded. Vectors hold independent sums side by side. So the results are those of
`csattn.sketch.reference`, bit for bit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, record_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES, F32x16, U16x16, fill, floats_of_halves, load, prefetch_early, store
from csattn.sketch.codes import COARSE_BITS, COARSE_CODES, FINE_BITS, FINE_CODES
from csattn.sketch.index import SketchIndex
from csattn.sketch.reference import LARGEST_EXPONENT, LARGEST_MULTIPLIER, LOG2_E, SCORE_ROOM

LARGEST_FINE, LARGEST_COARSE = 2**FINE_BITS - 1, 2**COARSE_BITS - 1
_ARRAYS = "codes", "marks", "segment_starts", "key_mean", "query_transform", "value_mean", "value_transform"
_WORDS = (
    *_ARRAYS,  # addresses of a SketchIndex's arrays, C-contiguous
    "num_heads",
    "head_dim",
    "num_fine",
    "num_coarse",
    "num_coords",
    "num_segments",
    "num_blocks",
    "context_len",
)
SKETCH = np.dtype([(name, np.int64) for name in _WORDS])
sketch_at = record_at(SKETCH)


def describe_sketch(index: SketchIndex) -> NDArray[Any]:
    """Return the SKETCH record [1] of an index, which must live as long as the record is used."""
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    for name, array in arrays.items():
        assert array.flags.c_contiguous, f"{name} of shape {array.shape} must be contiguous, not {array.strides}"
    values = {name: array.__array_interface__["data"][0] for name, array in arrays.items()}
    values["num_blocks"] = index.codes.shape[1]
    return np.array([tuple(values.get(name, getattr(index, name, 0)) for name in SKETCH.names or ())], SKETCH)


def query_bytes(index: SketchIndex, group_size: int) -> int:
    """Return the size of the memory of a group's queries: see `query_places`."""
    return 8 + group_size * index.num_segments * (24 + 5 * index.num_coords)


@exact_kernel
def query_places(sketch: Any, group_size: int) -> tuple[int, int, int, int, int]:
    """Return the byte offsets of these arrays in the memory of a group's queries:

    bounds [group_size, num_segments, 2] float64, means [group_size, num_segments] float32, coordinates [group_size,
    num_segments, num_coords] float32, offsets [group_size, num_segments] int32 and multipliers [group_size,
    num_segments, num_coords] int8. The memory begins with the exponent, an int64.
    """
    segments = group_size * sketch.num_segments
    bounds = 8
    means = bounds + 16 * segments
    coordinates = means + 4 * segments
    offsets = coordinates + 4 * segments * sketch.num_coords
    return bounds, means, coordinates, offsets, offsets + 4 * segments


@exact_kernel
def exponent_of(queries: int) -> Any:
    """Return the exponent of weighed queries: a unit of their scores is 2**exponent octaves."""
    return array_at(queries, 1, np.int64(0))[0]


@exact_kernel
def rows_of_segment(starts: NDArray[np.int32], segment: int, first: int, last: int) -> Any:
    """Return the first and one past the last of the rows [first, last) that belong to a segment."""
    end = np.int64(starts[segment + 1]) if segment + 1 < len(starts) else np.int64(last)
    return max(np.int64(starts[segment]), np.int64(first)), min(end, np.int64(last))


@exact_kernel
def project_queries(
    sketch: Any,
    head: int,
    q: NDArray[np.float64],  # [group_size * head_dim]
    first: int,  # of the segments [first, last)
    last: int,
    softmax_scale: float,
    memory: int,  # address of the group's queries: means, coordinates and bounds are written
) -> None:
    """Compute `reference.project`, and bounds: the largest coordinate's magnitude, and the most that codes can add."""
    head_dim, num_coords, num_segments = sketch.head_dim, sketch.num_coords, sketch.num_segments
    group_size, octaves = len(q) // head_dim, softmax_scale * LOG2_E
    at_bounds, at_means, at_coordinates, _, _ = query_places(sketch, group_size)
    bounds = array_at(memory + at_bounds, 2 * group_size * num_segments, np.float64(0))
    means = array_at(memory + at_means, group_size * num_segments, np.float32(0))
    coordinates = array_at(memory + at_coordinates, group_size * num_segments * num_coords, np.float32(0))
    scaled = np.empty(len(q), np.float32)
    for i in range(len(q)):
        scaled[i] = octaves * q[i]
    for segment in range(first, last):
        place = head * num_segments + segment
        key_mean = array_at(sketch.key_mean + 4 * place * head_dim, head_dim, np.float32(0))
        size = head_dim * num_coords
        transform = array_at(sketch.query_transform + 2 * place * size, size, np.uint16(0))
        for row in range(0, group_size, 4):
            place = row, segment, num_segments
            _mean_four(q, octaves, place, key_mean, means)
            _project_four(scaled, head_dim, place, transform, num_coords, coordinates)
            _bound_four(sketch, coordinates, row, group_size, segment, bounds)


@exact_kernel
def four_rows(row: int, group_size: int) -> tuple[int, int, int, int]:
    """Return the four rows from `row` on; where there are fewer, the last one again."""
    last = group_size - 1
    return row, min(row + 1, last), min(row + 2, last), min(row + 3, last)


@exact_kernel
def _mean_four(
    q: NDArray[np.float64],
    octaves: float,  # softmax_scale * log2(e)
    place: tuple[int, int, int],  # first of the rows, segment, num_segments
    key_mean: NDArray[np.float32],
    means: NDArray[np.float32],
) -> None:
    row, segment, num_segments = place
    head_dim = len(key_mean)
    r0, r1, r2, r3 = four_rows(row, len(q) // head_dim)
    q0, q1, q2, q3 = r0 * head_dim, r1 * head_dim, r2 * head_dim, r3 * head_dim
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(head_dim):
        mean = np.float64(key_mean[np.uint64(i)])
        a += q[np.uint64(q0 + i)] * mean
        b += q[np.uint64(q1 + i)] * mean
        c += q[np.uint64(q2 + i)] * mean
        d += q[np.uint64(q3 + i)] * mean
    means[r0 * num_segments + segment], means[r1 * num_segments + segment] = octaves * a, octaves * b
    means[r2 * num_segments + segment], means[r3 * num_segments + segment] = octaves * c, octaves * d


@exact_kernel
def _project_four(
    q: NDArray[np.float32],  # in octaves
    head_dim: int,
    place: tuple[int, int, int],  # first of the rows, segment, num_segments
    transform: NDArray[np.uint16],
    num_coords: int,
    coordinates: NDArray[np.float32],
) -> None:
    row, segment, num_segments = place
    r0, r1, r2, r3 = four_rows(row, len(q) // head_dim)
    q0, q1, q2, q3 = r0 * head_dim, r1 * head_dim, r2 * head_dim, r3 * head_dim
    for wanted in range(0, num_coords, LANES):
        j = min(wanted, num_coords - LANES)  # the last vector may overlap the one before
        if j < 0:
            for row in (r0, r1, r2, r3):
                _project_few(q, head_dim, (row, segment, num_segments), transform, num_coords, coordinates)
            return
        zero = fill(F32x16, 0.0)
        w, x, y, z = zero, zero, zero, zero
        for i in range(head_dim):
            prefetch_early(transform, (head_dim + i) * num_coords + j)  # of the next segment
            column = floats_of_halves(load(U16x16, transform, i * num_coords + j))
            w = w + fill(F32x16, q[np.uint64(q0 + i)]) * column
            x = x + fill(F32x16, q[np.uint64(q1 + i)]) * column
            y = y + fill(F32x16, q[np.uint64(q2 + i)]) * column
            z = z + fill(F32x16, q[np.uint64(q3 + i)]) * column
        store(coordinates, (r0 * num_segments + segment) * num_coords + j, w)
        store(coordinates, (r1 * num_segments + segment) * num_coords + j, x)
        store(coordinates, (r2 * num_segments + segment) * num_coords + j, y)
        store(coordinates, (r3 * num_segments + segment) * num_coords + j, z)


@exact_kernel
def _project_few(
    q: NDArray[np.float32],
    head_dim: int,
    place: tuple[int, int, int],  # row, segment, num_segments
    transform: NDArray[np.uint16],
    num_coords: int,  # 8
    coordinates: NDArray[np.float32],
) -> None:
    """Project onto fewer coordinates than a vector holds: load two rows of the transform at a time, and use one."""
    row, segment, num_segments = place
    both, sums = np.empty(LANES, np.float32), np.zeros(num_coords, np.float32)
    for i in range(head_dim):
        at = min(i, head_dim - 2)
        store(both, 0, floats_of_halves(load(U16x16, transform, at * num_coords)))
        for j in range(num_coords):
            sums[j] += q[row * head_dim + i] * both[(i - at) * num_coords + j]
    for j in range(num_coords):
        coordinates[(row * num_segments + segment) * num_coords + j] = sums[j]


@exact_kernel
def _bound_four(
    sketch: Any, coordinates: NDArray[np.float32], row: int, group_size: int, segment: int, bounds: NDArray[np.float64]
) -> None:
    num_coords, num_segments, num_fine = sketch.num_coords, sketch.num_segments, FINE_CODES * sketch.num_fine
    r0, r1, r2, r3 = four_rows(row, group_size)
    p0, p1 = r0 * num_segments + segment, r1 * num_segments + segment
    p2, p3 = r2 * num_segments + segment, r3 * num_segments + segment
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(num_coords):
        half = LARGEST_FINE / 2 if i < num_fine else LARGEST_COARSE / 2
        a += half * abs(np.float64(coordinates[np.uint64(p0 * num_coords + i)]))
        b += half * abs(np.float64(coordinates[np.uint64(p1 * num_coords + i)]))
        c += half * abs(np.float64(coordinates[np.uint64(p2 * num_coords + i)]))
        d += half * abs(np.float64(coordinates[np.uint64(p3 * num_coords + i)]))
    for place, total in ((p0, a), (p1, b), (p2, c), (p3, d)):
        of_segment = np.float32(0.0)
        for i in range(place * num_coords, (place + 1) * num_coords):
            of_segment = max(of_segment, abs(coordinates[np.uint64(i)]))
        bounds[2 * place], bounds[2 * place + 1] = of_segment, total


@exact_kernel
def quantise_queries(sketch: Any, group_size: int, memory: int) -> None:
    """Compute `reference.integer_queries`: write the exponent, multipliers and offsets."""
    num_coords, num_segments = sketch.num_coords, sketch.num_segments
    _, at_means, at_coordinates, at_offsets, at_multipliers = query_places(sketch, group_size)
    required, largest = np.empty(group_size, np.float64), 0.0
    for row in range(group_size):
        required[row] = _required_unit(sketch, group_size, row, memory)
        if required[row] <= 2.0**LARGEST_EXPONENT:
            largest = max(largest, required[row])
    exponent = -LARGEST_EXPONENT
    while 2.0**exponent < largest:
        exponent += 1
    array_at(memory, 1, np.int64(0))[0] = exponent
    for row in range(group_size):
        fits, per_unit = required[row] <= 2.0**LARGEST_EXPONENT, 2.0**-exponent
        of_row = row * num_segments
        means = array_at(memory + at_means + 4 * of_row, num_segments, np.float32(0))
        offsets = array_at(memory + at_offsets + 4 * of_row, num_segments, np.int32(0))
        for segment in range(num_segments):
            place = (of_row + segment) * num_coords
            coordinates = array_at(memory + at_coordinates + 4 * place, num_coords, np.float32(0))
            multipliers = array_at(memory + at_multipliers + place, num_coords, np.int8(0))
            if not fits:
                multipliers[:] = 0
                offsets[segment] = 0
                continue
            for i in range(num_coords):
                multipliers[i] = np.int32(np.rint(np.float64(coordinates[i]) * per_unit))
            difference = np.float64(means[segment]) - np.float64(means[0])
            offsets[segment] = np.int64(np.rint(difference * per_unit)) - (_largest_sum(sketch, multipliers) >> 1)


@exact_kernel
def _largest_sum(sketch: Any, multipliers: NDArray[np.int8]) -> np.int64:
    """Return the sum of multipliers times the largest codes."""
    num_fine, fine, coarse = FINE_CODES * sketch.num_fine, np.int64(0), np.int64(0)
    for i in range(num_fine):
        fine += multipliers[i]
    for i in range(num_fine, len(multipliers)):
        coarse += multipliers[i]
    return np.int64(LARGEST_FINE * fine + LARGEST_COARSE * coarse)


@exact_kernel
def _required_unit(sketch: Any, group_size: int, row: int, memory: int) -> float:
    """Return `reference.required_unit`, but infinity instead of NaN where no unit will do."""
    num_segments = sketch.num_segments
    at_bounds, at_means, _, _, _ = query_places(sketch, group_size)
    bounds = array_at(memory + at_bounds + 16 * row * num_segments, 2 * num_segments, np.float64(0))
    means = array_at(memory + at_means + 4 * row * num_segments, num_segments, np.float32(0))
    half_sum = (LARGEST_FINE * FINE_CODES * sketch.num_fine + LARGEST_COARSE * COARSE_CODES * sketch.num_coarse) / 2
    room, required = SCORE_ROOM - half_sum / 2, 0.0
    for segment in range(num_segments):
        total = bounds[2 * segment + 1] + abs(np.float64(means[segment]) - np.float64(means[0]))
        if not total < np.inf:
            return np.inf
        required = max(required, bounds[2 * segment] / LARGEST_MULTIPLIER, total / room)
    return required
