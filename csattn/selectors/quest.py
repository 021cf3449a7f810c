"""Quest (arXiv:2406.10774): pages of keys, ranked by an upper bound of q's product with any key of the page.

As published: pages of 16 keys, with the minimum and maximum of each channel, both updated by new keys.

Different: a page's group score is the sum of its softmax shares among pages over the group's query heads, as the paper
has no groups. Pages are cut off after exactly top_k rows. The tail begins a new page. No layer is dense (paper: two).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import joined, softmax_group_scores, top_rows


class PreparedQuest:
    """Lower and upper bounds of the keys in each page of the context: [num_kv_heads, num_pages, head_dim] each."""

    def __init__(self, layer: ContextLayer, page_size: int = 16):
        pages = torch.split(layer.keys, page_size, dim=1)
        self.page_size, self.context_len = page_size, layer.keys.shape[1]
        self.low = torch.stack([page.amin(1) for page in pages], dim=1)
        self.high = torch.stack([page.amax(1) for page in pages], dim=1)

    @property
    def index_bytes(self) -> int:
        return self.low.nbytes + self.high.nbytes

    def selector(self, view: ContextView) -> "QuestSelector":
        return QuestSelector(self, view)


class QuestSelector:
    """Chooses the rows of the best pages."""

    def __init__(self, prepared: PreparedQuest, view: ContextView):
        self._prepared, self._view = prepared, view
        self._low, self._high = prepared.low[:, :0], prepared.high[:, :0]  # of the tail's pages
        self._num_tail = 0

    @property
    def search_bytes(self) -> int:
        return self._prepared.index_bytes + self._low.nbytes + self._high.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        key = torch.from_numpy(k).to(self._low.dtype)[:, None]
        if self._num_tail % self._prepared.page_size == 0:
            self._low, self._high = torch.cat([self._low, key], dim=1), torch.cat([self._high, key], dim=1)
        else:
            self._low, self._high = self._low.clone(), self._high.clone()
            self._low[:, -1:] = torch.minimum(self._low[:, -1:], key)
            self._high[:, -1:] = torch.maximum(self._high[:, -1:], key)
        self._num_tail += 1

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        prepared = self._prepared
        low = joined(prepared.low, self._low).float()
        high = joined(prepared.high, self._high).float()
        grouped = torch.from_numpy(q).view(low.shape[0], -1, 1, low.shape[2])
        bounds = torch.maximum(grouped * low[:, None], grouped * high[:, None]).sum(-1)
        pages = softmax_group_scores(bounds * self._view.softmax_scale)
        of_context = torch.arange(prepared.context_len) // prepared.page_size
        of_tail = prepared.low.shape[1] + torch.arange(self._num_tail) // prepared.page_size
        return top_rows(pages[:, torch.cat([of_context, of_tail])], self._view)
