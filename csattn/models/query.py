"""A layer's queries before RoPE, from any hidden state: its own input, or an earlier layer's to look ahead."""

from typing import Any

import torch
from torch import Tensor


def queries_before_rope(layer: Any, hidden: Tensor) -> Tensor:
    """What the layer's attention would project from that input.

    layer: a decoder layer of a supported model. hidden: [q_len, hidden_size] -> [num_q_heads, q_len, head_dim].
    """
    attention = layer.self_attn
    q = attention.q_proj(layer.input_layernorm(hidden)).view(hidden.shape[0], -1, attention.head_dim)
    if hasattr(attention, "q_norm"):  # Qwen3
        q = attention.q_norm(q)
    return q.transpose(0, 1)  # type: ignore[no-any-return]


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE. q: [num_q_heads, q_len, head_dim]; cos, sin: [q_len, head_dim]."""
    first, second = q.chunk(2, dim=-1)
    return q * cos + torch.cat([-second, first], dim=-1) * sin
