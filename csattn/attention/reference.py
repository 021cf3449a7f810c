"""The definition of attention with its log-sum-exp, in float64."""

import torch
from torch import Tensor


def attend(
    q: Tensor,  # [batch_size, num_kv_heads, q_len, head_dim]
    k: Tensor,  # [batch_size, num_kv_heads, kv_len, head_dim]
    v: Tensor,
    softmax_scale: float,
    mask: Tensor | None = None,  # [q_len, kv_len] or broadcastable, bool: True where a query sees a row
    log_weights: Tensor | None = None,  # like mask, float32, finite: added to the logits
    logit_cap: float | None = None,  # logits are cap * tanh(logit / cap), before weights are added
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp [batch_size, num_kv_heads, q_len]; zeros and -inf without rows."""
    scores = q.double() @ k.double().transpose(-1, -2) * softmax_scale
    if logit_cap is not None:
        scores = logit_cap * (scores / logit_cap).tanh()
    if log_weights is not None:
        scores = scores + log_weights
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].clamp_min(torch.finfo(lse.dtype).min)).exp()  # zeros where there are no rows
    return (weights @ v.double()).to(q.dtype), lse.float()
