"""The true Top-K of each row, for the selector `exact`: reads every key."""

import numpy as np
from torch import Tensor

from csattn.search.workspace import TokenSelections
from workers.engine.cpu_context import CpuRequest


def choose_exactly(
    q: Tensor,  # [num_rows, num_q_heads, head_dim] float32
    request: CpuRequest,  # any of those that the rows belong to
    layer_idx: int,
    softmax_scale: float,
    out: TokenSelections,  # [num_rows, num_kv_heads, top_k]
) -> None:
    """The top_k rows of the context's middle by the group's summed softmax; of equal ones the first."""
    keys = request.context.kv[layer_idx][:, :, 0].float().transpose(1, 2)
    middle = request.view.middle
    for row, q_row in enumerate(q):  # one by one: the same bits whatever rows are beside it
        logits = q_row.view(keys.shape[0], -1, keys.shape[1]) @ keys
        worth = (logits * softmax_scale).softmax(-1).sum(1)[:, middle]
        best = worth.argsort(dim=1, descending=True, stable=True)[:, : request.top_k] + middle.start
        out.kv_indices[row] = best.sort(dim=1).values.numpy()
    out.valid_len[:] = np.int32(request.top_k)
