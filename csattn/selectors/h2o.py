"""H2O (arXiv:2306.14048): rows that have received much attention stay, all others are evicted for good.

As published: a row's score is its softmax weight summed over all queries so far, those of the context's own prefill
included. After the prefill the top_k best rows of the middle stay, besides sinks and recent rows. A row that leaves the
tail's window joins them with the score it has accumulated there, and the row with the lowest score is evicted.

Different: the query heads of a group share their rows, by the sum of their weights. The prefill is full attention (the
paper's evicts rows meanwhile). Sinks stay whatever their score. Only queries that are searched with count: predicted
ones if lookahead is 1, and none where a step reuses an earlier selection.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import softmax_group_scores, top_rows


class PreparedH2o:
    """received: [num_kv_heads, context_len] float32, the attention that each key has received during the prefill."""

    def __init__(self, layer: ContextLayer):
        self.keys = layer.keys
        self.received = layer.attention_received().view(layer.keys.shape[0], layer.group_size, -1).sum(1)

    @property
    def index_bytes(self) -> int:
        return self.received.nbytes

    def selector(self, view: ContextView) -> "H2oSelector":
        return H2oSelector(self, view)


class H2oSelector:
    """Keeps the rows that are left, and the attention that each has received."""

    search_bytes = 0  # scores come from attention that is computed anyway

    def __init__(self, prepared: PreparedH2o, view: ContextView):
        keys, middle = prepared.keys, view.middle
        self._view = view
        self._resident_keys = torch.cat([keys[:, : middle.start], keys[:, middle.stop :]], dim=1).float()
        heavy = top_rows(prepared.received.clone(), view).kv_indices
        self._kept = torch.from_numpy(heavy).long()  # [num_kv_heads, at most top_k], ascending
        self._kept_keys = keys[torch.arange(len(keys))[:, None], self._kept].float()
        self._received = prepared.received.gather(1, self._kept)  # [num_kv_heads, num_kept]
        # of the tail's rows that have not left its window
        self._received_recently = torch.zeros(len(keys), 0, dtype=torch.float32)
        self._num_left = 0

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        # a row that has left before any query saw it has received nothing
        leaving = torch.cat([self._received_recently, torch.zeros(len(k), 1, dtype=torch.float32)], dim=1)[:, :1]
        self._received_recently = self._received_recently[:, 1:]
        new = torch.full((len(k), 1), self._view.context_len + self._num_left)
        self._num_left += 1
        self._kept = torch.cat([self._kept, new], dim=1)
        self._kept_keys = torch.cat([self._kept_keys, torch.from_numpy(k)[:, None]], dim=1)
        self._received = torch.cat([self._received, leaving], dim=1)
        if self._kept.shape[1] > self._view.top_k:
            self._evict()

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        self._add_attention(torch.from_numpy(q), recent[:, :, 0].float())
        num_kv_heads, num_kept = self._kept.shape
        return Selection(self._kept.to(torch.int32).numpy(), np.full(num_kv_heads, num_kept, np.int32))

    def _add_attention(self, q: Tensor, recent: Tensor) -> None:
        """Add the query's softmax weights, over all rows that are left, to their scores."""
        num_kv_heads, num_resident, head_dim = self._resident_keys.shape
        num_kept, num_recent = self._kept.shape[1], recent.shape[1]
        keys = torch.cat([self._resident_keys, self._kept_keys, recent], dim=1)
        logits = q.view(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2) * self._view.softmax_scale
        weights = softmax_group_scores(logits)[:, num_resident:]
        self._received = self._received + weights[:, :num_kept]
        grown = torch.zeros(num_kv_heads, max(num_recent, self._received_recently.shape[1]), dtype=torch.float32)
        grown[:, : self._received_recently.shape[1]] = self._received_recently
        grown[:, :num_recent] += weights[:, num_kept:]
        self._received_recently = grown

    def _evict(self) -> None:
        """Drop each head's row with the lowest score; the latest one on ties."""
        last = self._received.shape[1] - 1
        lowest = last - self._received.flip(1).argmin(1)
        stays = torch.ones_like(self._received, dtype=torch.bool).scatter_(1, lowest[:, None], False)
        self._kept = self._kept[stays].view(-1, last)
        self._received = self._received[stays].view(-1, last)
        self._kept_keys = self._kept_keys[stays].view(len(self._kept), last, -1)
