"""The true Top-K: what an index can at best find, at the price of reading every key."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextView


class ExactSelector:
    """Top-K by the group's summed softmax over all keys, one selection per KV head."""

    indexes_tail = True

    def __init__(self, keys: Tensor, view: ContextView):
        """keys: [num_kv_heads, context_len, head_dim], read in place."""
        self._keys = keys
        self._view = view
        self._tail = keys.new_empty(keys.shape[0], 0, keys.shape[2])

    def append(self, k: NDArray[np.float32]) -> None:
        row = torch.from_numpy(k).to(self._tail.dtype)[:, None]
        self._tail = torch.cat([self._tail, row], dim=1)

    def select(self, q: NDArray[np.float32]) -> Selection:
        num_kv_heads, context_len, head_dim = self._keys.shape
        grouped = torch.from_numpy(q).to(self._keys.dtype).view(num_kv_heads, -1, head_dim)
        keys = (self._keys, self._tail) if self._tail.shape[1] else (self._keys,)
        logits = torch.cat([grouped @ part.transpose(1, 2) for part in keys], dim=2)
        worth = (logits.float() * self._view.softmax_scale).softmax(-1).sum(1)
        worth[:, : self._view.middle.start] = -1
        worth[:, self._view.middle.stop : context_len] = -1
        top_k = min(self._view.top_k, int((worth[0] >= 0).sum()))
        # stable, so that of equal keys the first come first
        order = worth.argsort(dim=1, descending=True, stable=True)[:, :top_k]
        return Selection(
            kv_indices=order.sort(dim=1).values.to(torch.int32).numpy(),
            valid_len=np.full(num_kv_heads, top_k, dtype=np.int32),
        )
