"""Find the centroids of some subspaces that are nearest to a group's queries, and the subspaces' weights.

Every sum runs in index order in float64, where products of float32 are exact. Vectors hold independent sums side by
side, so the results are those of `reference`, bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger
from csattn.cpu.simd import LANES, F32x16, F64x16, convert, fill, load, store


@exact_kernel
def match_centroids(
    q: NDArray[np.float64],  # [group_size * head_dim]
    columns: NDArray[np.float32],  # [(last - first) * subspace_dim * room]: `ListIndex.codebook_columns` of these
    first: int,  # of the subspaces [first, last) that are matched
    last: int,
    group_size: int,
    num_centroids: int,
    subspace_dim: int,
    weigh_by_norm: bool,
    centroid_ids: NDArray[np.int64],  # [group_size * stride], written from first to last
    weights: NDArray[np.float64],  # written in the same places
    stride: int,
) -> None:
    """Choose centroids as `reference.match_centroids` does."""
    head_dim, room = len(q) // group_size, len(columns) // ((last - first) * subspace_dim)
    dots = np.empty(room, np.float64)
    for row in range(group_size):
        for b in range(last - first):
            part = b * subspace_dim
            at = row * head_dim + first * subspace_dim + part
            for j in range(0, room, LANES):
                sums = fill(F64x16, 0.0)
                for d in range(subspace_dim):
                    column = convert(F64x16, load(F32x16, columns, (part + d) * room + j))
                    sums = fma(fill(F64x16, q[np.uint64(at + d)]), column, sums)
                store(dots, j, sums)
            square = 0.0
            for d in range(subspace_dim):
                square += q[at + d] * q[at + d]
            centroid_ids[row * stride + first + b] = _first_largest(dots, num_centroids)
            weights[row * stride + first + b] = np.sqrt(square) if weigh_by_norm else 1.0


@exact_kernel
def _first_largest(values: NDArray[np.float64], count: int) -> int:
    """Return the first index of the largest of the first `count` values. NaN is ignored; 0 if nothing exceeds -inf."""
    whole = count - count % LANES
    largest = -np.inf
    if whole > 0:
        lanes, of_lanes = fill(F64x16, -np.inf), np.empty(LANES, np.float64)
        for i in range(0, whole, LANES):
            lanes = larger(load(F64x16, values, i), lanes)
        store(of_lanes, 0, lanes)
        for lane in range(LANES):
            largest = max(largest, of_lanes[lane])
    for i in range(whole, count):
        if values[i] > largest:
            largest = values[i]
    for i in range(count):
        if values[i] == largest and largest > -np.inf:
            return i
    return 0


@exact_kernel
def widen(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Convert to float64."""
    wide, whole = np.empty(len(values), np.float64), len(values) - len(values) % LANES
    for i in range(0, whole, LANES):
        store(wide, i, convert(F64x16, load(F32x16, values, i)))
    for i in range(whole, len(values)):
        wide[i] = values[i]
    return wide
