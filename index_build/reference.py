"""The definition of a centroid's scores, in torch: what every faster form must meet to the bit.

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
