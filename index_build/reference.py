"""The definition of a table's scores and codes, in torch: what every faster form must meet to the bit.

The product of two float32 is exact in float64, and the sum over a subspace is taken in the order of its
dimensions, so that every machine, device, blocking and thread count gets the same bits from the same centroids
and keys, whether or not it fuses multiplication and addition.
"""

import torch
from torch import Tensor


def centroid_scores(
    codebook: Tensor,  # [num_centroids, subspace_dim] float32
    keys: Tensor,  # [subspace_dim, context_len] float32
) -> Tensor:
    """c_j . k_i for all pairs: [num_centroids, context_len] float32, rounded once."""
    scores = torch.zeros(codebook.shape[0], keys.shape[1], dtype=torch.float64)
    for dim in range(codebook.shape[1]):
        scores += codebook[:, dim, None].double() * keys[dim].double()
    return scores.float()


def quantise_rows(
    scores: Tensor,  # [num_centroids, context_len] float32
    scales: Tensor,  # [num_centroids] float32, see `index_build.scales`
    largest_code: int,
) -> Tensor:
    """The int8 code nearest to each score, ties to even; a row of scale 0 has codes 0."""
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    return (scores / steps).round().clamp(-largest_code, largest_code).to(torch.int8)
