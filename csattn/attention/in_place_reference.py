"""The definition of attention in place: one row of a step at a time, in float64."""

import torch
from torch import Tensor

from csattn.attention import reference


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    sink_end: int,
    window_start: int,
    kv_indices: Tensor,  # [num_index_heads, top_k] int32
    valid_len: Tensor,  # [num_index_heads] int32
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: what the row sees of it
    softmax_scale: float,
) -> Tensor:
    """Attention over [0, sink_end), the selected rows and [window_start, context_len) of the context, and the tail.

    Returns [num_q_heads, head_dim] float32.
    """
    num_index_heads, num_kv_heads = kv_indices.shape[0], context.shape[0]
    outs = []
    for head, group in enumerate(q.chunk(num_index_heads)):
        kv_head = head // (num_index_heads // num_kv_heads)
        chosen = kv_indices[head, : valid_len[head]].long()
        parts = context[kv_head, :sink_end], context[kv_head, chosen], context[kv_head, window_start:], tail[kv_head]
        rows = torch.cat(parts)[None, None]
        out, _ = reference.attend(group[None, None], rows[..., 0, :], rows[..., 1, :], softmax_scale)
        outs.append(out[0, 0])
    return torch.cat(outs)
