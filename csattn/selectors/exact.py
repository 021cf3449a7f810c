"""The true Top-K: what an index can at best find, at the price of reading every key."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import RowsSoFar, group_shares, top_rows


@dataclass(frozen=True, slots=True)
class PreparedExact:
    """Nothing: the KV is read as it is."""

    layer: ContextLayer

    @property
    def index_bytes(self) -> int:
        return 0

    def selector(self, view: ContextView) -> "ExactSelector":
        return ExactSelector(self.layer, view)


class ExactSelector:
    """Top-K by the group's summed softmax over all keys, one selection per KV head."""

    def __init__(self, layer: ContextLayer, view: ContextView):
        self._keys = layer.keys
        self._view = view
        self._tail = RowsSoFar(layer.keys)

    @property
    def search_bytes(self) -> int:
        return self._keys.nbytes + self._tail.rows.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row(torch.from_numpy(k))

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        keys = self._keys
        grouped = torch.from_numpy(q).to(keys.dtype).view(keys.shape[0], -1, keys.shape[2])
        parts = (keys, self._tail.rows) if self._tail.num_rows else (keys,)
        logits = torch.cat([grouped @ part.transpose(1, 2) for part in parts], dim=2).float()
        return top_rows(group_shares(logits * self._view.softmax_scale), self._view)
