"""From a query to the nearest centroid of each subspace and the subspace's weight."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel


@exact_kernel
def match_centroids(
    q: NDArray[np.float32],  # [head_dim]
    query_basis: NDArray[np.float32],  # [head_dim, head_dim]
    codebooks: NDArray[np.float32],  # [num_subspaces, num_centroids, subspace_dim]
    weigh_by_norm: bool,
    rotated: NDArray[np.float64],  # [head_dim], written
    centroid_ids: NDArray[np.int64],  # [num_subspaces], written
    weights: NDArray[np.float64],  # [num_subspaces], written
) -> None:
    """Choose centroids bit for bit as `reference.match_centroids` does.

    Every sum runs in index order in float64, and the loops are vectorised over sums, never inside one.
    """
    num_subspaces, num_centroids, subspace_dim = codebooks.shape
    rotated[:] = 0.0
    for i in range(len(q)):
        x = np.float64(q[i])
        for j in range(len(q)):
            rotated[j] += x * query_basis[i, j]
    for j in range(len(q)):
        rotated[j] = np.float32(rotated[j])
    for b in range(num_subspaces):
        part = rotated[b * subspace_dim : (b + 1) * subspace_dim]
        best = -np.inf
        centroid_ids[b] = 0
        for j in range(num_centroids):
            dot = 0.0
            for d in range(subspace_dim):
                dot += part[d] * codebooks[b, j, d]
            if dot > best:
                best = dot
                centroid_ids[b] = j
        weights[b] = 1.0
        if weigh_by_norm:
            square = 0.0
            for d in range(subspace_dim):
                square += part[d] * part[d]
            weights[b] = np.sqrt(square)
