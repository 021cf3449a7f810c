"""The definition of decode attention over a step's rows, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.attention import reference
from csattn.batch import DeviceSelection, StepRows


def attend_step(
    q: Tensor,  # [batch_size, num_q_heads, head_dim]
    resident: Sequence[Tensor],  # for each context [num_kv_heads, rows_per_head, 2, head_dim]; K, then V
    tails: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
    far: Sequence[Tensor],  # like resident
    far_rows: DeviceSelection,
    rows: StepRows,
    softmax_scale: float,
    spill: Sequence[Tensor] | None = None,  # like resident
) -> Tensor:
    """Attention of each row over all resident rows, the rows of its tail that it sees, and its selection.

    A selected id >= 0 is a row of `far`, an id <= -2 row -2 - id of `spill`. Returns out, like q; zeros for idle rows
    and where there is no row to attend to.
    """
    out = torch.zeros_like(q)
    num_q_heads, num_kv_heads = q.shape[1], tails.shape[1]
    num_index_heads = far_rows.valid_len.shape[1]
    for b, context in enumerate(rows.context_ids.tolist()):
        if context < 0:
            continue
        tail = tails[int(rows.tail_ids[b]), :, : int(rows.tail_lens[b])]
        for head in range(num_q_heads):
            index_head, kv_head = head * num_index_heads // num_q_heads, head * num_kv_heads // num_q_heads
            ids = far_rows.kv_indices[b, index_head, : int(far_rows.valid_len[b, index_head])].long()
            parts = [far[context][kv_head, ids[ids >= 0]], resident[context][kv_head], tail[kv_head]]
            if spill is not None:
                parts.append(spill[context][kv_head, -2 - ids[ids <= -2]])
            kv = torch.cat(parts)
            head_out, _ = reference.attend(
                q[b, head][None, None, None], kv[None, None, :, 0], kv[None, None, :, 1], softmax_scale
            )
            out[b, head] = head_out[0, 0, 0]
    return out
