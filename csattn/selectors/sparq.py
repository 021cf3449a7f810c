"""SparQ (arXiv:2312.04985): logits from the largest components of q alone, and the mean value for rows left out.

As published, with groups as in the authors' code: the r components with the largest |q|, summed over the group's query
heads, are used. Logits are computed from these, with the temperature corrected by the share of |q| that they hold. Rows
are chosen by the sum of the group's logits. Each head's output is mixed with the mean of all values by the softmax
share of the rows that are not attended to. r is a quarter of head_dim. The transposed copy of the keys, in which each
component is contiguous, counts in `index_bytes` but is not made.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Rest, Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import AppendedRows, mask_resident, top_rows


class PreparedSparq:
    """The keys, unchanged, and the sum of the values [num_kv_heads, head_dim] float32."""

    def __init__(self, layer: ContextLayer, num_components: int | None = None):
        """num_components: r. Default: a quarter of head_dim."""
        self.keys = layer.keys
        self.num_components = num_components or max(1, layer.keys.shape[2] // 4)
        self.value_sum = layer.values.sum(1, dtype=torch.float32)

    @property
    def index_bytes(self) -> int:
        """The bytes of the values' sum, and of the paper's second copy of the keys, with contiguous components."""
        return self.keys.nbytes + self.value_sum.nbytes

    def selector(self, view: ContextView) -> "SparqSelector":
        return SparqSelector(self, view)


class SparqSelector:
    """Chooses rows by approximate logits, and estimates the rest by the mean value."""

    def __init__(self, prepared: PreparedSparq, view: ContextView):
        self._prepared, self._view = prepared, view
        self._tail = AppendedRows(prepared.keys)
        self._value_sum = prepared.value_sum

    @property
    def search_bytes(self) -> int:
        read = self._prepared.keys.nbytes + self._tail.rows.nbytes
        return read * self._prepared.num_components // self._prepared.keys.shape[2]

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row(torch.from_numpy(k))
        self._value_sum = self._value_sum + torch.from_numpy(v)

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        num_kv_heads, _, head_dim = self._prepared.keys.shape
        grouped = torch.from_numpy(q).view(num_kv_heads, -1, head_dim)
        logits = self._approximate_logits(grouped, recent[:, :, 0])
        num_keys = self._view.context_len + self._tail.num_rows
        chosen = top_rows(logits[:, :, :num_keys].sum(1), self._view)
        values = recent[:, :, 1].sum(1, dtype=torch.float32) + self._value_sum
        mean_value = values / (num_keys + recent.shape[1])
        rest = Rest(
            out=mean_value[:, None].expand_as(grouped).reshape(q.shape).numpy(),
            share=self._rest_share(logits, chosen).flatten().numpy(),
        )
        return Selection(chosen.kv_indices, chosen.valid_len, rest=rest)

    def _approximate_logits(self, grouped: Tensor, recent: Tensor) -> Tensor:
        """Return [num_kv_heads, group_size, num_keys] float32: the context's rows, then appended and recent ones."""
        size = grouped.abs()
        best = size.sum(1).topk(self._prepared.num_components).indices[:, None]  # [num_kv_heads, 1, r]
        covered = size.gather(2, best.expand(-1, grouped.shape[1], -1)).sum(-1, keepdim=True)
        coverage = covered / size.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        q_part = grouped.gather(2, best.expand(-1, grouped.shape[1], -1))
        logits = []
        for keys in (self._prepared.keys, self._tail.rows, recent):
            part = keys.gather(2, best.expand(-1, keys.shape[1], -1)).float()
            logits.append(q_part @ part.transpose(1, 2))
        # an all-zero q has coverage 0, and all its products are 0
        return torch.cat(logits, dim=2) * self._view.softmax_scale / coverage.clamp_min(1e-12).sqrt()

    def _rest_share(self, logits: Tensor, chosen: Selection) -> Tensor:
        """Return the softmax share of rows that are neither resident nor chosen: [num_kv_heads, group_size]."""
        shares = logits.softmax(-1)[..., : self._view.context_len + self._tail.num_rows]
        mask_resident(shares, self._view, 0.0)
        rows = torch.from_numpy(chosen.kv_indices).long()[:, None].expand(-1, shares.shape[1], -1)
        return shares.scatter(2, rows, 0.0).sum(-1).clamp(max=1.0)
