"""The definition of decode attention for a step's rows, in float64."""

from collections.abc import Sequence
from math import log

import numpy as np
import torch
from torch import Tensor

from csattn.attention import reference
from csattn.attention.merge import join_sinks, merge_state
from csattn.batch import DeviceSelection, StepRows
from csattn.reach import Reach
from csattn.rest import Moments
from csattn.rest.reference import estimate_rest


def attend_step(
    q: Tensor,  # [batch_size, num_q_heads, head_dim]
    resident: Sequence[Tensor],  # for each context [num_kv_heads, rows_per_head, 2, head_dim]; K, then V
    tails: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
    far: Sequence[Tensor],  # like resident
    far_rows: DeviceSelection,
    rows: StepRows,
    softmax_scale: float,
    spill: Sequence[Tensor] | None = None,  # like resident
    moments: Sequence[tuple[Moments, int]] | None = None,  # for each context, with its number of selectable rows
    reach: Reach | None = None,  # resident rows are contexts' last ones, and rows see those within; None: all
    logit_cap: float | None = None,
    sinks: Tensor | None = None,  # [num_q_heads] float32
) -> tuple[Tensor, Tensor]:
    """Attend, for each row, to all resident rows, to the rows of its tail that it sees, and to its selection.

    With moments, also attend, by an estimate, to the rows that may be selected and are not. A selected id >= 0 is a row
    of `far`, an id <= -2 row -2 - id of `spill`. Returns out, like q, with zeros for rows that attend to nothing, and
    lse [batch_size, num_q_heads] in octaves (log2).
    """
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    num_q_heads, num_kv_heads = q.shape[1], tails.shape[1]
    num_index_heads = far_rows.valid_len.shape[1]
    for b, context in enumerate(rows.context_ids.tolist()):
        tail_start = int(rows.tail_starts[b])
        first = tail_start if reach is not None else int(rows.own_lens[b])
        tail = tails[int(rows.tail_ids[b]), :, first - tail_start : int(rows.tail_lens[b]) - tail_start]
        near = tail[:, :0] if context < 0 else resident[context]
        if reach is not None:
            position = int(rows.positions[b])
            num_seen = position + 1 - reach.first_seen(position)
            near = near[:, near.shape[1] - min(near.shape[1], max(0, num_seen - tail.shape[1])) :]
            tail = tail[:, -num_seen:]
        for head in range(num_q_heads):
            index_head, kv_head = head * num_index_heads // num_q_heads, head * num_kv_heads // num_q_heads
            num_ids = 0 if context < 0 else int(far_rows.valid_len[b, index_head])
            ids = far_rows.kv_indices[b, index_head, :num_ids].long()
            parts = [far[context][kv_head, ids[ids >= 0]], near[kv_head], tail[kv_head]]
            if spill is not None:
                parts.append(spill[context][kv_head, -2 - ids[ids <= -2]])
            kv = torch.cat(parts)
            head_out, lse[b, head] = reference.attend(
                q[b, head][None, None, None],
                kv[None, None, :, 0],
                kv[None, None, :, 1],
                softmax_scale,
                logit_cap=logit_cap,
            )
            out[b, head] = head_out[0, 0, 0]
        if moments is not None and context >= 0:
            of_context, num_rows = moments[context]
            num_chosen, by_row = far_rows.valid_len[b, None].numpy(), q[b, None].float().numpy()
            rest = estimate_rest(by_row, of_context, num_chosen, np.array([num_rows]), softmax_scale)
            rest_out, rest_lse = (torch.from_numpy(x[0]) for x in rest)
            merged, lse[b] = merge_state(out[b].double(), lse[b], rest_out, rest_lse)
            out[b] = torch.where(lse[b, :, None] > -torch.inf, merged, 0.0)
    if sinks is not None:
        out, lse = join_sinks(out, lse, sinks), torch.logaddexp(lse, sinks)
    return out, lse / log(2)


def merge_own(out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor, rows: StepRows) -> Tensor:
    """Merge attention to the first rows.own_lens own rows into the others': out, and lse in octaves, are of both."""
    merged, _ = merge_state(out.double(), log(2) * lse, own_out.double(), log(2) * own_lse)
    return torch.where(rows.own_lens[:, None, None] > 0, merged.to(out.dtype), out)
