"""From the queries of a group to the nearest centroids of some subspaces, and the subspaces' weights."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.lanes import fma
from csattn.search.simd import F32x16, F64x16, convert, fill, load, store

LANES = 16


@exact_kernel
def match_centroids(
    rotated: NDArray[np.float64],  # [group_size * (last - first) * subspace_dim]: of `rotate`
    codebooks: NDArray[np.float32],  # [(last - first) * num_centroids * subspace_dim]: of those subspaces
    first: int,  # of the subspaces [first, last) that are matched
    last: int,
    num_centroids: int,
    subspace_dim: int,
    weigh_by_norm: bool,
    centroid_ids: NDArray[np.int64],  # [group_size * stride], written from first to last
    weights: NDArray[np.float64],  # likewise
    stride: int,
) -> None:
    """Choose centroids bit for bit as `reference.match_centroids` does.

    Every sum runs in index order in float64, where products of float32 are exact: vectors hold sums side by side.
    """
    width = (last - first) * subspace_dim
    room = -(-num_centroids // LANES) * LANES
    by_column = np.zeros(subspace_dim * room, np.float32)
    dots = np.empty(room, np.float64)
    for b in range(last - first):
        for j in range(num_centroids):
            for d in range(subspace_dim):
                by_column[np.uint64(d * room + j)] = codebooks[np.uint64((b * num_centroids + j) * subspace_dim + d)]
        for row in range(len(rotated) // width):
            part = row * width + b * subspace_dim
            for j in range(0, room, LANES):
                sums = fill(F64x16, 0.0)
                for d in range(subspace_dim):
                    column = convert(F64x16, load(F32x16, by_column, d * room + j))
                    sums = fma(fill(F64x16, rotated[np.uint64(part + d)]), column, sums)
                store(dots, j, sums)
            best, centroid = -np.inf, 0
            for j in range(num_centroids):
                if dots[np.uint64(j)] > best:
                    best = dots[np.uint64(j)]
                    centroid = j
            square = 0.0
            for d in range(subspace_dim):
                square += rotated[part + d] * rotated[part + d]
            centroid_ids[row * stride + first + b] = centroid
            weights[row * stride + first + b] = np.sqrt(square) if weigh_by_norm else 1.0


@exact_kernel
def pool_queries(
    q: NDArray[np.float32],  # [group_size * head_dim]
    head_dim: int,
) -> NDArray[np.float32]:
    """The sum of the queries, each scaled to norm 1: [head_dim], bit for bit `reference.pool_queries`."""
    sums = np.zeros(head_dim, np.float64)
    for first in range(0, len(q), head_dim):
        square = 0.0
        for i in range(first, first + head_dim):
            square += np.float64(q[i]) * np.float64(q[i])
        norm = np.sqrt(square)
        if norm > 0.0:
            for i in range(head_dim):
                sums[i] += np.float64(q[first + i]) / norm
    pooled = np.empty(head_dim, np.float32)
    for i in range(head_dim):
        pooled[i] = np.float32(sums[i])
    return pooled


@exact_kernel
def rotate(
    q: NDArray[np.float32],  # [group_size * head_dim]
    query_basis: NDArray[np.float32],  # [head_dim * head_dim]
    head_dim: int,
    first: int,
    last: int,
) -> NDArray[np.float64]:
    """Columns [first, last) of q @ query_basis, rounded to float32: [group_size * (last - first)]."""
    group_size, width = len(q) // head_dim, last - first
    rotated = np.empty(group_size * width, np.float64)
    whole = width - width % LANES
    for row in range(group_size):
        for j in range(0, whole, LANES):
            sums = fill(F64x16, 0.0)
            for i in range(head_dim):
                column = convert(F64x16, load(F32x16, query_basis, i * head_dim + first + j))
                sums = fma(fill(F64x16, q[np.uint64(row * head_dim + i)]), column, sums)
            store(rotated, row * width + j, sums)
        for j in range(whole, width):
            total = 0.0
            for i in range(head_dim):
                total += np.float64(q[row * head_dim + i]) * query_basis[i * head_dim + first + j]
            rotated[row * width + j] = total
    for i in range(group_size * width):
        rotated[i] = np.float32(rotated[i])
    return rotated
