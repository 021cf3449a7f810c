"""Which context rows a step attends to besides the resident ones: a few kilobytes, whatever the context length."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rest:
    """An estimate of what attention to the rows that were not selected would give."""

    out: NDArray[np.float32]  # [num_q_heads, head_dim]
    share: NDArray[np.float32]  # [num_q_heads], in [0, 1]: the softmax weight of those rows


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows to fetch in one layer. `num_index_heads` is num_kv_heads, or num_q_heads when a group does not share.

    Rows at and above context_len are rows of the tail that have left its window. A step attends to resident and
    selected rows, whose logits `log_weights` shift; with a `rest` it then gives (1 - share) * out + share * rest.out.
    """

    kv_indices: NDArray[np.int32]  # [num_index_heads, top_k], ascending, unique, -1 padded
    valid_len: NDArray[np.int32]  # [num_index_heads]
    log_weights: NDArray[np.float32] | None = None  # [num_index_heads, top_k]: added to logits; 0 at padding
    rest: Rest | None = None

    @property
    def num_rows(self) -> int:
        """Rows fetched over all heads."""
        return int(self.valid_len.sum())

    def check(self, kv_len: int) -> None:
        """Raise AssertionError if a head's rows are unordered, repeated, outside [0, kv_len) or badly padded."""
        for head, valid in enumerate(self.valid_len):
            rows, padding = self.kv_indices[head, :valid], self.kv_indices[head, valid:]
            assert (np.diff(rows) > 0).all(), f"rows of head {head} are not strictly ascending"
            assert valid == 0 or (rows[0] >= 0 and rows[-1] < kv_len), f"head {head} selects outside [0, {kv_len})"
            assert (padding == -1).all(), f"head {head} has rows after its valid_len {valid}"
        if self.log_weights is not None:
            assert self.log_weights.shape == self.kv_indices.shape, "a row has no weight, or a weight no row"
            assert np.isfinite(self.log_weights).all(), "a weight is not finite"
            assert not self.log_weights[self.kv_indices < 0].any(), "padding has weights"
        if self.rest is not None:
            assert np.isfinite(self.rest.out).all(), "the estimate of the rest is not finite"
            assert ((self.rest.share >= 0) & (self.rest.share <= 1)).all(), "a share is outside [0, 1]"


def join_choices(of_context: Selection, of_tail: Selection, context_len: int) -> Selection:
    """One selection of both; of_tail: rows of the tail, counted from its first."""
    width = of_context.kv_indices.shape[1] + of_tail.kv_indices.shape[1]
    kv_indices = np.full((len(of_context.valid_len), width), -1, np.int32)
    for head, (first, second) in enumerate(zip(of_context.valid_len, of_tail.valid_len, strict=True)):
        kv_indices[head, :first] = of_context.kv_indices[head, :first]
        kv_indices[head, first : first + second] = context_len + of_tail.kv_indices[head, :second]
    return Selection(kv_indices, of_context.valid_len + of_tail.valid_len)
