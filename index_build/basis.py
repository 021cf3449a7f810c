"""Coordinates in which head_dim is split into subspaces.

For any invertible A, (q @ A) . (k @ inverse(A).T) = q . k, so the split may happen in coordinates where it
loses least. `key_whitened` takes A = sqrt(cov(k)) @ R with R the principal axes of the queries so scaled:
keys then have unit covariance in every subspace, so that the error of replacing a query part by its centroid
is the same as the error of the scores; and a query's energy is sorted, and dealt out evenly to the subspaces.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.config import Basis

# Directions in which keys hardly vary would be blown up by whitening; this share of the mean variance keeps them.
_RIDGE = 1e-4

Matrix = NDArray[np.float32]


def make_basis(
    kind: Basis,
    queries: NDArray[np.float32],  # [num_queries, head_dim]
    centered_keys: NDArray[np.float32],  # [context_len, head_dim]
    num_subspaces: int,
) -> tuple[Matrix, Matrix]:
    """query_basis and key_basis [head_dim, head_dim]: (q @ query_basis) . (k @ key_basis) = q . k."""
    head_dim = queries.shape[1]
    if kind == "plain":
        identity = np.eye(head_dim, dtype=np.float32)
        return identity, identity
    if kind == "rope_pairs":
        permutation = np.eye(head_dim, dtype=np.float32)[:, _rope_pair_order(head_dim, num_subspaces)]
        return permutation, permutation
    return _key_whitened(queries, centered_keys, num_subspaces)


def _rope_pair_order(head_dim: int, num_subspaces: int) -> NDArray[np.int64]:
    """Dimensions reordered so that a subspace holds whole RoPE pairs (d, d + head_dim/2), frequencies spread."""
    num_pairs = head_dim // 2
    if num_pairs % num_subspaces:
        pairs = np.arange(num_pairs)
    else:
        pairs = np.arange(num_pairs).reshape(-1, num_subspaces).T.reshape(-1)
    return np.stack([pairs, pairs + num_pairs], axis=1).reshape(-1)


def _key_whitened(
    queries: NDArray[np.float32], centered_keys: NDArray[np.float32], num_subspaces: int
) -> tuple[Matrix, Matrix]:
    head_dim = queries.shape[1]
    keys, queries64 = centered_keys.astype(np.float64), queries.astype(np.float64)
    covariance = keys.T @ keys / len(keys)
    ridge = _RIDGE * np.trace(covariance) / head_dim
    variances, axes = np.linalg.eigh(covariance + (ridge or 1.0) * np.eye(head_dim))
    root = axes * np.sqrt(variances) @ axes.T
    inverse_root = axes / np.sqrt(variances) @ axes.T
    scaled = queries64 @ root
    _, principal = np.linalg.eigh(scaled.T @ scaled / len(scaled))
    rotation = principal[:, ::-1][:, _snake_order(head_dim, num_subspaces)]
    return (root @ rotation).astype(np.float32), (inverse_root @ rotation).astype(np.float32)


def _snake_order(head_dim: int, num_subspaces: int) -> NDArray[np.int64]:
    """Deal axes, strongest first, to the subspaces in turn, back and forth, so that all get like energy."""
    rounds = np.arange(head_dim).reshape(-1, num_subspaces)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(-1)
