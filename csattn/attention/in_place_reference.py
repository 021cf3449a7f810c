"""The definition of attention in place: one row of a step at a time, in float64."""

import numpy as np
import torch
from torch import Tensor

from csattn.attention import reference
from csattn.attention.merge import merge_state
from csattn.rest import Moments
from csattn.rest.reference import estimate_rest


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    sink_end: int,
    window_start: int,
    kv_indices: Tensor,  # [num_index_heads, top_k] int32
    valid_len: Tensor,  # [num_index_heads] int32
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: what the row sees of it
    softmax_scale: float,
    moments: Moments | None = None,  # of [sink_end, window_start); None: rows that are not selected count nothing
) -> Tensor:
    """Attention over [0, sink_end), the selected rows and [window_start, context_len) of the context, and the tail.

    And, by an estimate, over the rows that are not selected. Returns [num_q_heads, head_dim] float32.
    """
    num_index_heads, num_kv_heads = kv_indices.shape[0], context.shape[0]
    outs, lses = [], []
    for head, group in enumerate(q.chunk(num_index_heads)):
        kv_head = head // (num_index_heads // num_kv_heads)
        chosen = kv_indices[head, : valid_len[head]].long()
        parts = context[kv_head, :sink_end], context[kv_head, chosen], context[kv_head, window_start:], tail[kv_head]
        rows = torch.cat(parts)[None, None]
        out, lse = reference.attend(group[None, None], rows[..., 0, :], rows[..., 1, :], softmax_scale)
        outs.append(out[0, 0])
        lses.append(lse[0, 0])
    if moments is None:
        return torch.cat(outs)
    num_rows = np.array([window_start - sink_end])
    rest, rest_lse = estimate_rest(q[None].numpy(), moments, valid_len[None].numpy(), num_rows, softmax_scale)
    return merge_state(torch.cat(outs), torch.cat(lses), torch.from_numpy(rest[0]), torch.from_numpy(rest_lse[0]))[0]
