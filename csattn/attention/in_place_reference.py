"""The definition of attention in place: one row of a step at a time, in float64."""

import numpy as np
import torch
from torch import Tensor

from csattn.attention import reference
from csattn.attention.merge import merge_state
from csattn.rest import Moments
from csattn.rest.reference import estimate_rest
from csattn.sketch.index import SketchIndex
from csattn.sketch.reference import attend_rest


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    sink_end: int,
    window_start: int,
    kv_indices: Tensor,  # [num_index_heads, top_k] int32
    valid_len: Tensor,  # [num_index_heads] int32
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: what the row sees of it
    softmax_scale: float,
    # of [sink_end, window_start), one of them: what tells of the rows that are not selected; else they count nothing
    moments: Moments | None = None,
    sketch: SketchIndex | None = None,
) -> Tensor:
    """Attention over [0, sink_end), the selected rows and [window_start, context_len) of the context, and the tail.

    And, by moments or by codes, over the rows that are not selected. Returns [num_q_heads, head_dim] float32.
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
    if moments is not None:
        num_rows = np.array([window_start - sink_end])
        estimated = estimate_rest(q[None].numpy(), moments, valid_len[None].numpy(), num_rows, softmax_scale)
        rest, rest_lse = estimated[0][0], estimated[1][0]
    elif sketch is not None:
        is_rest = np.zeros((num_kv_heads, sketch.context_len), np.bool_)
        is_rest[:, sink_end:window_start] = True
        for head in range(num_kv_heads):
            is_rest[head, kv_indices[head, : valid_len[head]].numpy()] = False
        rest, rest_lse = attend_rest(q.numpy(), sketch, is_rest, softmax_scale)
    else:
        return torch.cat(outs)
    return merge_state(torch.cat(outs), torch.cat(lses), torch.from_numpy(rest), torch.from_numpy(rest_lse))[0]
