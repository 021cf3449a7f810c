"""The result of a search: which rows a step attends to besides the resident ones. It takes a few kilobytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rest:
    """An estimate of attention over the rows that were not selected."""

    out: NDArray[np.float32]  # [num_q_heads, head_dim]
    share: NDArray[np.float32]  # [num_q_heads], in [0, 1]: the softmax weight of those rows


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows to fetch in one layer. `num_index_heads` is num_kv_heads, or num_q_heads if a group does not share.

    Indices from context_len on are rows of the tail that have left its window. A step attends to resident and selected
    rows and adds `log_weights` to the logits of the selected ones. With a `rest`, the result is
    (1 - share) * out + share * rest.out.
    """

    kv_indices: NDArray[np.int32]  # [num_index_heads, top_k], ascending, unique, -1 padded
    valid_len: NDArray[np.int32]  # [num_index_heads]
    log_weights: NDArray[np.float32] | None = None  # [num_index_heads, top_k]: added to logits; 0 at padding
    rest: Rest | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows fetched, summed over all heads."""
        return int(self.valid_len.sum())


def join_choices(of_context: Selection, of_tail: Selection, context_len: int) -> Selection:
    """Concatenate two selections. of_tail: its indices count from the first row of the tail."""
    width = of_context.kv_indices.shape[1] + of_tail.kv_indices.shape[1]
    kv_indices = np.full((len(of_context.valid_len), width), -1, np.int32)
    for head, (first, second) in enumerate(zip(of_context.valid_len, of_tail.valid_len, strict=True)):
        kv_indices[head, :first] = of_context.kv_indices[head, :first]
        kv_indices[head, first : first + second] = context_len + of_tail.kv_indices[head, :second]
    return Selection(kv_indices, of_context.valid_len + of_tail.valid_len)
