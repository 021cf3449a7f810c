"""Reference for several residual streams: DeepSeek-V4's hyper-connections (mHC, arXiv:2512.24880).

A branch (attention or MLP) reads a weighted sum of the streams. Its output is added to each stream with a weight, while
the streams are mixed by a doubly stochastic matrix (rows and columns sum to 1). All of these weights are computed from
the streams themselves.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from csattn.models.spec import StreamsSpec
from csattn.models.weights import StreamWeights


class Mixture(NamedTuple):
    """Weights of streams around a branch, float32. When streams are joined, post and comb are empty."""

    pre: Tensor  # [..., num]: of each stream in the branch's input
    post: Tensor  # [..., num]: of the branch's output in each stream
    comb: Tensor  # [..., num, num]: at [i, j], of old stream i in new stream j


def mixture_of(
    streams: Tensor,  # [..., num, hidden_size] float32
    weights: StreamWeights,
    spec: StreamsSpec,
    eps: float,  # of the model's norms
) -> Mixture:
    """Compute the weights around a branch, or, if `weights.joins`, those that join the streams."""
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
    for number in range(2 * spec.iterations - 1):  # Sinkhorn's algorithm, which begins and ends with columns
        comb = comb / (comb.sum(-1 if number % 2 else -2, keepdim=True) + spec.eps)
    return Mixture(pre, 2 * torch.sigmoid(post), comb)


def mixed_streams(
    streams: Tensor,  # [..., num, hidden_size]
    branch_out: Tensor,  # [..., hidden_size]: the branch's output
    post: Tensor,
    comb: Tensor,
) -> Tensor:
    """Return the streams after a branch, [..., num, hidden_size]. post, comb: see `Mixture`. All of one dtype."""
    return post[..., None] * branch_out[..., None, :] + comb.transpose(-1, -2) @ streams


def joined_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """Return the weighted sum of the streams, [..., hidden_size] float32. pre: see `Mixture`."""
    return (pre[..., None] * streams).sum(-2)
