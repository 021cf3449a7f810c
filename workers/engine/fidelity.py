"""What one row attends to in one layer, beside exact attention: the check that runs while a service answers."""

import torch
from torch import Tensor

from csattn.selection import Selection
from workers.engine.cpu_context import CpuRequest
from workers.serving.step_engine import Fidelity


def fidelity(
    request: CpuRequest,
    q: Tensor,  # [num_q_heads, head_dim] float32
    context: Tensor,  # [num_kv_heads, context_len, 2, head_dim]: of that layer
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: what the row sees of it
    chosen: Selection | None,
    softmax_scale: float,
) -> Fidelity:
    """Reads all keys, as exact attention does."""
    num_kv_heads, context_len = context.shape[:2]
    grouped = q.view(num_kv_heads, -1, q.shape[-1])
    parts = [grouped @ rows[:, :, 0].float().transpose(1, 2) for rows in (context, tail)]
    weights = (torch.cat(parts, dim=2) * softmax_scale).softmax(-1)  # [num_kv_heads, group_size, kv_len]
    first, second = request.near
    attended = torch.ones_like(weights, dtype=torch.bool)
    attended[:, :, first:second] = False
    if chosen is not None:
        by_index_head = attended.view(len(chosen.valid_len), -1, attended.shape[-1])
        for head, valid in enumerate(chosen.valid_len):
            by_index_head[head][:, torch.from_numpy(chosen.kv_indices[head, :valid]).long()] = True
    return Fidelity(
        recall=_recall(request, weights[:, :, :context_len], attended[:, :, :context_len]),
        mass=float((weights * attended).sum(-1).mean()),
    )


def _recall(request: CpuRequest, weights: Tensor, attended: Tensor) -> float:
    """weights, attended: [num_kv_heads, group_size, context_len]."""
    middle = request.view.middle
    top_k = min(request.view.top_k, middle.stop - middle.start)
    if top_k == 0:
        return 1.0
    best = weights[:, :, middle].sum(1, keepdim=True).topk(top_k, dim=2).indices + middle.start
    return float(attended.gather(2, best.expand(-1, weights.shape[1], -1)).float().mean())
