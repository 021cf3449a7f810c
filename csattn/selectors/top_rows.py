"""Helpers that most selectors share: the best rows by group scores, and a growing array of appended rows."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextView


def top_rows(group_scores: Tensor, view: ContextView) -> Selection:
    """Select each head's view.top_k best rows, without resident ones; the first ones on ties.

    group_scores: [num_index_heads, num_keys] float, changed in place; num_keys is context_len plus the number of rows
    that have left the tail's window. NaN counts as the greatest, as in a sort, and minus infinity as the most negative
    finite number.
    """
    group_scores.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # minus infinity is reserved for resident rows
    mask_resident(group_scores, view)
    num_heads, num_keys = group_scores.shape
    num_resident = view.context_len - (view.middle.stop - view.middle.start)
    top_k = min(view.top_k, num_keys - num_resident)
    if top_k == 0:
        return Selection(np.empty((num_heads, 0), np.int32), np.zeros(num_heads, np.int32))
    worst = group_scores.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    better, equal = group_scores > worst, group_scores == worst
    num_left = top_k - better.sum(1, keepdim=True)
    rows = (better | (equal & (equal.cumsum(1) <= num_left))).nonzero()[:, 1].view(num_heads, top_k)
    return Selection(rows.to(torch.int32).numpy(), np.full(num_heads, top_k, dtype=np.int32))


def mask_resident(group_scores: Tensor, view: ContextView, value: float | bool = -torch.inf) -> None:
    """Write `value` to the context's resident rows, in place. group_scores: [..., num_keys]."""
    group_scores[..., : view.middle.start] = value
    group_scores[..., view.middle.stop : view.context_len] = value


def softmax_group_scores(logits: Tensor) -> Tensor:
    """Return each row's group score: its softmax shares summed over the query heads of the group.

    logits: [num_kv_heads, group_size, num_keys], scaled -> [num_kv_heads, num_keys] float32.
    """
    return logits.float().softmax(-1).sum(1)


def joined(of_context: Tensor, of_tail: Tensor) -> Tensor:
    """Concatenate to [num_kv_heads, num_rows, width]; without a copy if the tail has no rows."""
    return torch.cat([of_context, of_tail], dim=1) if of_tail.shape[1] else of_context


class AppendedRows:
    """An array of rows that are appended one by one: [num_kv_heads, num_rows, width].

    Versions share memory: extending one a second time overwrites what the first extension appended.
    """

    def __init__(self, like: Tensor):
        """like: [num_kv_heads, ..., width], for shape and dtype."""
        self._storage = like.new_empty(like.shape[0], 16, like.shape[-1])  # shared with longer versions
        self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        return self._storage[:, : self.num_rows]

    def with_row(self, row: Tensor) -> "AppendedRows":
        """Return these rows and one more; this object does not change. row: [num_kv_heads, width]."""
        more = copy(self)
        if self.num_rows == self._storage.shape[1]:
            more._storage = torch.cat([self._storage, torch.empty_like(self._storage)], dim=1)
        more._storage[:, self.num_rows] = row.to(self._storage.dtype)
        more.num_rows += 1
        return more


def padded_selection(rows: Sequence[Tensor]) -> Selection:
    """Make a selection of each index head's rows, given as ascending integers, of any number per head."""
    kv_indices = np.full((len(rows), max(len(of_head) for of_head in rows)), -1, np.int32)
    for head, of_head in enumerate(rows):
        kv_indices[head, : len(of_head)] = of_head.numpy()
    return Selection(kv_indices, np.array([len(of_head) for of_head in rows], np.int32))
