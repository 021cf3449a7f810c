"""What one row attends to in one layer, beside exact attention: the check that runs while a service answers."""

import torch
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors import ContextView
from workers.serving.step_engine import Fidelity


def fidelity(
    view: ContextView,
    near: tuple[int, int],  # context rows [0, first) and [second, context_len) are attended to
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]: of that layer, on q's device
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: what the row sees of it
    chosen: Selection | None,
) -> Fidelity:
    """Reads all keys, as exact attention does."""
    num_kv_heads, context_len = context.shape[:2]
    grouped = q.view(num_kv_heads, -1, q.shape[-1])
    parts = [grouped @ rows[:, :, 0].float().transpose(1, 2) for rows in (context, tail)]
    weights = (torch.cat(parts, dim=2) * view.softmax_scale).softmax(-1)  # [num_kv_heads, group_size, kv_len]
    first, second = near
    attended = torch.ones_like(weights, dtype=torch.bool)
    attended[:, :, first:second] = False
    if chosen is not None:
        by_index_head = attended.view(len(chosen.valid_len), -1, attended.shape[-1])
        for head, valid in enumerate(chosen.valid_len):
            by_index_head[head][:, torch.from_numpy(chosen.kv_indices[head, :valid]).long().to(q.device)] = True
    return Fidelity(
        recall=_recall(view, weights[:, :, :context_len], attended[:, :, :context_len]),
        mass=float((weights * attended).sum(-1).mean()),
    )


def _recall(view: ContextView, weights: Tensor, attended: Tensor) -> float:
    """weights, attended: [num_kv_heads, group_size, context_len]."""
    middle = view.middle
    top_k = min(view.top_k, middle.stop - middle.start)
    if top_k == 0:
        return 1.0
    best = weights[:, :, middle].sum(1, keepdim=True).topk(top_k, dim=2).indices + middle.start
    return float(attended.gather(2, best.expand(-1, weights.shape[1], -1)).float().mean())
