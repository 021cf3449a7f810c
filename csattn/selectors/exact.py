"""The true Top-K: what an index can at best find, at the price of reading every key."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import RowsSoFar, group_shares, top_rows


class AllKeys:
    """What a selector has that reads every key of context and tail."""

    def __init__(self, layer: ContextLayer, view: ContextView):
        self._keys = layer.keys
        self._view = view
        self._tail = RowsSoFar(layer.keys)

    @property
    def search_bytes(self) -> int:
        return self._keys.nbytes + self._tail.rows.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row(torch.from_numpy(k))


class ExactSelector(AllKeys):
    """Top-K by the group's summed softmax over all keys, one selection per KV head."""

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        return top_rows(group_shares(logits_of(q, self._keys, self._tail.rows, self._view.softmax_scale)), self._view)


def logits_of(q: NDArray[np.float32], keys: Tensor, tail: Tensor, softmax_scale: float) -> Tensor:
    """Scaled products with all keys, then all of the tail's: [num_kv_heads, group_size, num_keys] float32.

    q: [num_q_heads, head_dim]; keys, tail: [num_kv_heads, ..., head_dim].
    """
    grouped = torch.from_numpy(q).to(keys.dtype).view(keys.shape[0], -1, keys.shape[2])
    parts = (keys, tail) if tail.shape[1] else (keys,)
    return torch.cat([grouped @ part.transpose(1, 2) for part in parts], dim=2).float() * softmax_scale
