"""Exact Top-K, the best that an index can find, at the price of reading every key."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import AppendedRows, softmax_group_scores, top_rows


@dataclass(frozen=True, slots=True)
class PreparedExact:
    """Prepares nothing: the KV is read as it is."""

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
        self._tail = AppendedRows(layer.keys)

    @property
    def search_bytes(self) -> int:
        return self._keys.nbytes + self._tail.rows.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row(torch.from_numpy(k))

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        num_kv_heads, _, head_dim = self._keys.shape
        grouped = torch.from_numpy(q).view(num_kv_heads, -1, head_dim)
        # one head at a time, to hold no more keys in float32
        parts = (
            torch.stack([queries @ of_head.float().T for queries, of_head in zip(grouped, keys, strict=True)])
            for keys in (self._keys, self._tail.rows)
        )
        logits = torch.cat([*parts], dim=2)
        return top_rows(softmax_group_scores(logits * self._view.softmax_scale), self._view)
