"""Exact Top-p (Twilight, arXiv:2502.02770): as few rows as hold a share p of the softmax weight, and no fewer.

The rule as published, on exact weights instead of 4-bit estimates, without a first selection that it would prune, and
for a whole group: the weights are the mean of its query heads'. How many rows that takes differs from head to head and
step to step; `keep` has no say in it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.exact import AllKeys, logits_of
from csattn.selectors.top_rows import group_shares, mask_resident, num_free, padded_selection


class TopPSelector(AllKeys):
    """The heaviest rows until they hold, with the resident ones, the share p."""

    def __init__(self, layer: ContextLayer, view: ContextView, p: float = 0.95):
        super().__init__(layer, view)
        self._p = p

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        tail = torch.cat([self._tail.rows, recent[:, :, 0].to(self._keys.dtype)], dim=1)
        logits = logits_of(q, self._keys, tail, self._view.softmax_scale)
        weights = group_shares(logits)[:, : self._view.context_len + self._tail.num_rows] / logits.shape[1]
        mask_resident(weights, self._view)
        order = weights.argsort(dim=1, descending=True, stable=True)
        weights.clamp_min_(0)
        # what is left out of the softmax by all, by all but the best, ...; the first share of at most 1 - p is enough
        left_out = weights.sum(1, keepdim=True) - weights.gather(1, order).cumsum(1)
        num_needed = (left_out > 1 - self._p).sum(1) + (weights.sum(1) > 1 - self._p).long()
        num_needed.clamp_(max=num_free(self._view, weights.shape[1]))
        return padded_selection([rows[:n].sort().values for rows, n in zip(order, num_needed.tolist(), strict=True)])
