"""The definition of a score: eager, with every head's score of every key in memory.

score[t, s] = key_scale[s] * sum over heads h of weights[t, h] * relu(q[t, h] . k[s])
"""

import torch
from torch import Tensor

from csattn.lightning.operands.indexer import Operands


def score_keys(operands: Operands) -> Tensor:
    """Return all scores: [num_queries, num_keys] float32. This takes num_heads times the memory of the result."""
    per_head = torch.einsum("qhd,kd->qhk", operands.q.float(), operands.k.float()).relu()
    scores = (per_head * operands.weights[:, :, None]).sum(1)
    return scores if operands.key_scale is None else scores * operands.key_scale
