"""What most selectors end with, and what they keep: the best rows by some worth, and rows that become more."""

import numpy as np
import torch
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextView


def top_rows(worth: Tensor, view: ContextView) -> Selection:
    """The view's top_k best rows of each head, resident ones left out; of equal ones the first.

    worth: [num_index_heads, num_keys] float, finite; num_keys is context_len and the rows that have left the tail's
    window. Changed in place.
    """
    mask_resident(worth, view)
    num_free = worth.shape[1] - (view.context_len - (view.middle.stop - view.middle.start))
    top_k = min(view.top_k, num_free)
    # stable, so that of equal rows the first come first
    order = worth.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    return Selection(
        kv_indices=order.sort(dim=1).values.to(torch.int32).numpy(),
        valid_len=np.full(worth.shape[0], top_k, dtype=np.int32),
    )


def mask_resident(worth: Tensor, view: ContextView, value: float = -torch.inf) -> None:
    """Write that value where the context's rows are resident. worth: [..., num_keys]."""
    worth[..., : view.middle.start] = value
    worth[..., view.middle.stop : view.context_len] = value


def group_shares(logits: Tensor) -> Tensor:
    """What each row is worth to a group: its softmax shares, summed over the heads.

    logits: [num_kv_heads, group_size, num_keys], scaled -> [num_kv_heads, num_keys] float32.
    """
    return logits.float().softmax(-1).sum(1)


class RowsSoFar:
    """Rows that are appended one by one, side by side: [num_kv_heads, num_rows, width]."""

    def __init__(self, like: Tensor):
        """like: [num_kv_heads, ..., width], for shape and dtype."""
        self._room = like.new_empty(like.shape[0], 16, like.shape[-1])
        self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        return self._room[:, : self.num_rows]

    def append(self, row: Tensor) -> None:
        """row: [num_kv_heads, width]."""
        if self.num_rows == self._room.shape[1]:
            self._room = torch.cat([self._room, torch.empty_like(self._room)], dim=1)
        self._room[:, self.num_rows] = row.to(self._room.dtype)
        self.num_rows += 1
