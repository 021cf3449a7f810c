"""Attention of a step's tokens over rows that are the same for all of them, at once or piece after piece."""

from collections.abc import Iterable

import torch
from torch import Tensor

from csattn.attention import attend, merge_state


def attend_rows(
    q: Tensor,  # [num_q_heads, num_tokens, head_dim]
    rows: Tensor,  # [num_kv_heads, num_rows, 2, head_dim]
    softmax_scale: float,
    mask: Tensor | None = None,  # [num_tokens, num_rows]
) -> tuple[Tensor, Tensor]:
    """Out like q, in the rows' dtype, and lse [num_q_heads, num_tokens] float32."""
    num_q_heads, num_tokens, head_dim = q.shape
    group_size = num_q_heads // rows.shape[0]
    packed = q.reshape(1, rows.shape[0], group_size * num_tokens, head_dim).to(rows.dtype)
    mask = mask.repeat(group_size, 1) if mask is not None else None
    out, lse = attend(packed, rows[None, :, :, 0], rows[None, :, :, 1], softmax_scale, mask)
    return out.reshape(q.shape), lse.reshape(num_q_heads, num_tokens)


def attend_pieces(q: Tensor, pieces: Iterable[Tensor], softmax_scale: float) -> tuple[Tensor, Tensor, int]:
    """As `attend_rows` over all rows of disjoint pieces, and how many rows these were.

    pieces: [num_kv_heads, num_rows, 2, head_dim] each, used before the next is asked for, and merged by their
    log-sum-exps in float32 in their order (the online softmax, arXiv:1805.02867): what is held does not grow with the
    number of pieces. Of one piece the result is `attend_rows`', to the bit; without any, zeros and -inf.
    """
    num_rows, out, lse = 0, torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for rows in pieces:
        piece_out, piece_lse = attend_rows(q, rows, softmax_scale)
        first = num_rows == 0
        num_rows += rows.shape[1]
        out, lse = (piece_out, piece_lse) if first else merge_state(out.float(), lse, piece_out.float(), piece_lse)
    return out, lse, num_rows
