"""The scale of each row of a table: how far its codes reach.

Scales come out the same to the bit on every device. What is summed over the keys are integers, small enough that
any order of summation is exact in float64; everything after is written as single operations in a fixed order.
Two habits of libraries would break this: a division by a Python number (CUDA multiplies by its reciprocal), and
a sum over an axis.
"""

import torch
from torch import Tensor

# A row's scores beyond this many standard deviations are clipped when it has only 4 bits.
_CLIP_SIGMAS = 4.0
_EXACT_BITS = 53  # of a float64
_WIDE_ELEMENTS = 1 << 24  # of keys held in float64 at a time


def row_scales(
    codebooks: Tensor,  # [num_parts, num_centroids, subspace_dim] float32; a part is a subspace of a head
    keys: Tensor,  # [num_parts, subspace_dim, context_len] float32
    largest: Tensor,  # [num_parts, num_centroids] float32: the largest magnitude among a centroid's scores
    score_bits: int,
) -> Tensor:
    """Scales [num_parts, num_centroids] float32. A row whose scores are all zero has scale 0."""
    limit = largest.double()
    if score_bits == 4:
        mean, covariance = _exact_moments(keys)
        centroids = codebooks.double()
        score_mean = _ordered_dot(centroids, mean[:, None])
        along = _ordered_dot(centroids[:, :, None], covariance[:, None])
        variance = _ordered_dot(centroids, along).clamp_min(0.0)
        limit = torch.minimum(limit, variance.sqrt() * _CLIP_SIGMAS + score_mean.abs())
    return (limit * (1.0 / (127 if score_bits == 8 else 7))).float()


def _exact_moments(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [num_parts, subspace_dim] and covariance [num_parts, subspace_dim, subspace_dim] float64 of the keys.

    Keys are rounded to multiples of a small step first: 2^-18 of the largest at 128K keys.
    """
    subspace_dim, context_len = keys.shape[1:]
    bits = (_EXACT_BITS - context_len.bit_length()) // 2  # so that context_len products fit _EXACT_BITS
    means, covariances = [], []
    parts_at_once = max(1, _WIDE_ELEMENTS // (subspace_dim * context_len))
    for start in range(0, len(keys), parts_at_once):
        parts = keys[start : start + parts_at_once]
        largest = parts.abs().amax((1, 2)).double()[:, None]
        step = torch.where(largest > 0, largest * 2.0**-bits, 1.0)
        whole = parts.double().div_(step[:, None]).round_()
        mean = whole.sum(2) * (1.0 / context_len) * step
        second = whole @ whole.mT * (1.0 / context_len) * (step * step)[:, None]
        means.append(mean)
        covariances.append(second - mean[:, :, None] * mean[:, None])
    return torch.cat(means), torch.cat(covariances)


def _ordered_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over the last axis, from its first entry to its last, each operation rounded."""
    total = a[..., 0] * b[..., 0]
    for dim in range(1, a.shape[-1]):
        total = total + a[..., dim] * b[..., dim]
    return total
