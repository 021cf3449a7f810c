"""Merge attention over disjoint sets of rows by their log-sum-exps."""

import torch
from torch import Tensor


def merge_state(
    out_a: Tensor,  # [..., head_dim]
    lse_a: Tensor,  # [...] float32, natural log
    out_b: Tensor,
    lse_b: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of KV rows into attention over their union.

    An empty side has lse -inf and a finite `out`; at least one side must have a row.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = (lse_a - lse).exp()[..., None]
    weight_b = (lse_b - lse).exp()[..., None]
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add a sink logit, which has no row, to the softmax of attention. out: [..., head_dim]; lse, sinks: [...]."""
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
