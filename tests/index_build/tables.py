"""Codebooks and keys to make tables of, and their scores by definition."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from index_build.layer import make_list_table


def centroids_and_keys(
    rng: np.random.Generator,
    num_heads: int,
    num_subspaces: int,
    num_centroids: int,
    subspace_dim: int,
    context_len: int,
) -> tuple[Tensor, Tensor]:
    """Return unit centroids and keys as the build has them, with awkward ones among the keys.

    Some keys are zero, repeated, or far from the rest; the last subspace of the first head has only zero keys.
    """
    codebooks = rng.standard_normal((num_heads, num_subspaces, num_centroids, subspace_dim)).astype(np.float32)
    codebooks /= np.linalg.norm(codebooks, axis=-1, keepdims=True)
    keys = rng.standard_normal((num_heads, num_subspaces * subspace_dim, context_len)).astype(np.float32)
    keys[:, :, :: 7 + context_len // 3] *= 40.0
    keys[:, :, 3:5] = 0.0
    keys[:, :, 6:7] = keys[:, :, 5:6]
    keys[0, -subspace_dim:] = 0.0
    return torch.from_numpy(codebooks), torch.from_numpy(keys)


def list_table(codebooks: Tensor, keys: Tensor, list_len: int) -> dict[str, Tensor]:
    with ThreadPoolExecutor(2) as threads:
        return make_list_table(codebooks, keys, list_len, threads)


def scores_by_definition(codebooks: Tensor, keys: Tensor) -> Tensor:
    """Return scores [num_index_heads, num_subspaces, num_centroids, context_len] float32."""
    weights, parts = codebooks.double(), keys.view(*codebooks.shape[:2], codebooks.shape[3], -1).double()
    scores = torch.zeros(*codebooks.shape[:3], keys.shape[2], dtype=torch.float64)
    for dim in range(codebooks.shape[3]):
        scores += weights[..., dim, None] * parts[:, :, None, dim]
    return scores.float()
