"""Several residual streams in place of one, by definition: DeepSeek-V4's hyper-connections (mHC, arXiv:2512.24880).

A branch reads a mixture of the streams. What it gives is added to each of them, by weights, while they are mixed by a
matrix whose rows and columns sum up to 1. All of these weights are computed from the streams themselves.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from csattn.models.spec import StreamsSpec
from csattn.models.weights import StreamWeights


class Mixture(NamedTuple):
    """Weights of streams, float32. Where streams are joined, the last two are empty."""

    pre: Tensor  # [..., num]: of what the next branch reads
    post: Tensor  # [..., num]: of what it gives
    comb: Tensor  # [..., num, num]: at [i, j], of stream i in what stream j becomes


def mixture_of(
    streams: Tensor,  # [..., num, hidden_size] float32
    weights: StreamWeights,
    spec: StreamsSpec,
    eps: float,  # of the model's norms
) -> Mixture:
    """By the weights before a branch, or by those that join the streams."""
    together, num = streams.flatten(-2), spec.num
    normed = together * torch.rsqrt(together.square().mean(-1, keepdim=True) + eps)
    widths = [num, num, num * num][: len(weights.scales)]
    parts = zip(
        torch.split(functional.linear(normed, weights.matrix), widths, -1),
        torch.split(weights.bias, widths),
        weights.scales,
        strict=True,
    )
    pre, *others = (product * scale + bias for product, bias, scale in parts)
    pre = torch.sigmoid(pre) + spec.eps
    if weights.joins:
        return Mixture(pre, pre[..., :0], pre[..., :0, None])
    post, comb = others
    comb = comb.unflatten(-1, (num, num)).softmax(-1) + spec.eps
    for number in range(2 * spec.iterations - 1):  # columns first, and last
        comb = comb / (comb.sum(-1 if number % 2 else -2, keepdim=True) + spec.eps)
    return Mixture(pre, 2 * torch.sigmoid(post), comb)


def mixed_streams(
    streams: Tensor,  # [..., num, hidden_size]
    given: Tensor,  # [..., hidden_size]: by a branch
    post: Tensor,
    comb: Tensor,
) -> Tensor:
    """What streams become, [..., num, hidden_size]. post, comb: as in `Mixture`. All of one dtype."""
    return post[..., None] * given[..., None, :] + comb.transpose(-1, -2) @ streams


def joined_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """The streams' sum, each times its weight, [..., hidden_size] float32."""
    return (pre[..., None] * streams).sum(-2)
