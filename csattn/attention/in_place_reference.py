"""The definition of attention in place: one row of a step at a time, in float64."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csattn.attention import reference
from csattn.attention.merge import join_sinks, merge_state
from csattn.rest import Moments
from csattn.rest.reference import estimate_rest
from csattn.sketch.index import SketchIndex
from csattn.sketch.reference import attend_rest


@dataclass(frozen=True)
class OwnChoice:
    """The choice from the first rows of a tail, which have their own sketch."""

    kv_indices: Tensor  # [num_kv_heads, top_k] int32: the chosen ones
    valid_len: Tensor  # [num_kv_heads] int32
    sketch: SketchIndex  # of these rows


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    sink_end: int,
    window_start: int,
    kv_indices: Tensor,  # [num_index_heads, top_k] int32
    valid_len: Tensor,  # [num_index_heads] int32
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: the part that the row sees
    softmax_scale: float,
    # one of these for the rows of [sink_end, window_start) that are not selected; None of them: those are dropped
    moments: Moments | None = None,
    sketch: SketchIndex | None = None,
    own: OwnChoice | None = None,  # None: all of the tail is attended to exactly
    logit_cap: float | None = None,
    sinks: Tensor | None = None,  # [num_q_heads] float32
) -> Tensor:
    """Attend to [0, sink_end), the selected rows and [window_start, context_len) of the context, and to the tail.

    Rows that are not selected are attended to by moments or by codes, and the heads' sink logits join the softmax.
    Returns [num_q_heads, head_dim] float32.
    """
    num_coded = own.sketch.context_len if own is not None else 0
    num_index_heads, num_kv_heads = kv_indices.shape[0], context.shape[0]
    outs, lses = [], []
    for head, group in enumerate(q.chunk(num_index_heads)):
        kv_head = head // (num_index_heads // num_kv_heads)
        chosen = kv_indices[head, : valid_len[head]].long()
        parts = [context[kv_head, :sink_end], context[kv_head, chosen], context[kv_head, window_start:]]
        if own is not None:
            parts.append(tail[kv_head, own.kv_indices[kv_head, : own.valid_len[kv_head]].long()])
        parts.append(tail[kv_head, num_coded:])
        rows = torch.cat(parts)[None, None]
        out, lse = reference.attend(
            group[None, None], rows[..., 0, :], rows[..., 1, :], softmax_scale, logit_cap=logit_cap
        )
        outs.append(out[0, 0])
        lses.append(lse[0, 0])
    out, lse = torch.cat(outs), torch.cat(lses)
    if own is not None:
        rest = _rest_by_codes(q, own.sketch, 0, num_coded, own.kv_indices, own.valid_len, softmax_scale)
        out, lse = merge_state(out, lse, *rest)
    if moments is not None:
        num_rows = np.array([window_start - sink_end])
        estimated = estimate_rest(q[None].numpy(), moments, valid_len[None].numpy(), num_rows, softmax_scale)
        out, lse = merge_state(out, lse, torch.from_numpy(estimated[0][0]), torch.from_numpy(estimated[1][0]))
    elif sketch is not None:
        rest = _rest_by_codes(q, sketch, sink_end, window_start, kv_indices, valid_len, softmax_scale)
        out, lse = merge_state(out, lse, *rest)
    return out if sinks is None else join_sinks(out, lse, sinks)


def _rest_by_codes(
    q: Tensor, sketch: SketchIndex, first: int, stop: int, kv_indices: Tensor, valid_len: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend, by codes, to the rows of [first, stop) that are not chosen."""
    is_rest = np.zeros((sketch.num_heads, sketch.context_len), np.bool_)
    is_rest[:, first:stop] = True
    for head in range(sketch.num_heads):
        is_rest[head, kv_indices[head, : valid_len[head]].numpy()] = False
    out, lse = attend_rest(q.numpy(), sketch, is_rest, softmax_scale)
    return torch.from_numpy(out), torch.from_numpy(lse)
