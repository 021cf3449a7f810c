"""Attention of streams, token by token: the definitions that `WindowRows` and `HeavyRows` must meet.

A token sees some rows of the sequence, the last of which is its own. They are numbered in the order of their tokens.
RoPE takes these numbers, their places in the cache, as positions of query and keys.
"""

import torch
from torch import Tensor

from csattn.models.query import rotate


def window_attention(
    q: Tensor,  # [num_q_heads, num_tokens, head_dim], before RoPE
    k: Tensor,  # [num_kv_heads, num_tokens, head_dim], before RoPE
    v: Tensor,
    frequencies: Tensor,  # [head_dim // 2]: RoPE's angle from one place to the next
    softmax_scale: float,
    sink_len: int,
    window_len: int,
) -> Tensor:
    """Return each token's attention to the first sink_len and the last window_len rows, shaped like q."""
    outs = []
    for token in range(q.shape[1]):
        seen = [row for row in range(token + 1) if row < sink_len or row > token - window_len]
        heads = [
            _attend_from(group_q, k[head, seen], v[head, seen], frequencies, softmax_scale)[0]
            for head, group_q in enumerate(q[:, token].chunk(k.shape[0]))
        ]
        outs.append(torch.cat(heads))
    return torch.stack(outs, dim=1)


def heavy_attention(
    q: Tensor,  # as for `window_attention`
    k: Tensor,
    v: Tensor,
    frequencies: Tensor,
    softmax_scale: float,
    heavy_len: int,
    window_len: int,
) -> tuple[Tensor, list[list[list[int]]]]:
    """Return each token's attention to heavy hitters and the last window_len rows, shaped like q, and the rows it saw.

    A row's mass is the attention it has received so far, summed over tokens and the group's query heads. When a
    token finds heavy_len + window_len rows, the row of least mass outside the last window_len - 1 is evicted
    first; of equals, the oldest. The rows seen are [token][KV head], ascending.
    """
    num_kv_heads = k.shape[0]
    mass = torch.zeros(num_kv_heads, k.shape[1], dtype=torch.float64)
    kept: list[list[int]] = [[] for _ in range(num_kv_heads)]
    outs, all_seen = [], []
    for token in range(q.shape[1]):
        heads = []
        for head, group_q in enumerate(q[:, token].chunk(num_kv_heads)):
            if len(kept[head]) == heavy_len + window_len:
                candidates = kept[head][: heavy_len + 1]
                kept[head].remove(min(candidates, key=lambda row: (float(mass[head, row]), row)))
            kept[head].append(token)
            seen = kept[head]
            out, weights = _attend_from(group_q, k[head, seen], v[head, seen], frequencies, softmax_scale)
            mass[head, seen] += weights.double().sum(0)
            heads.append(out)
        outs.append(torch.cat(heads))
        all_seen.append([list(rows) for rows in kept])
    return torch.stack(outs, dim=1), all_seen


def _attend_from(
    q: Tensor,  # [group_size, head_dim], of the token that made the last row
    k: Tensor,  # [num_rows, head_dim]
    v: Tensor,
    frequencies: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out [group_size, head_dim] and weights [group_size, num_rows]. Row i has place i, queries the last."""
    angles = torch.outer(torch.arange(len(k), dtype=torch.float64), frequencies.double())
    cos, sin = torch.cat([angles, angles], 1).cos().to(q.dtype), torch.cat([angles, angles], 1).sin().to(q.dtype)
    scores = rotate(q, cos[-1], sin[-1]) @ rotate(k, cos, sin).T * softmax_scale
    weights = scores.softmax(-1)
    return weights @ v, weights
