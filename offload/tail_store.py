"""A request's own KV rows: its question and what it generated."""

import torch
from torch import Tensor

_FIRST_CAPACITY = 128


class TailStore:
    """KV rows of one request in one layer, in order of position; grows by doubling. The first rows set the dtype."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self._rows = torch.empty(num_kv_heads, 0, 2, head_dim)
        self.num_rows = 0

    def __repr__(self) -> str:
        return f"<TailStore {self.num_rows}/{self._rows.shape[1]} rows>"

    @property
    def kv(self) -> Tensor:
        """All rows: [num_kv_heads, num_rows, 2, head_dim], a view that the next `append` may outdate."""
        return self._rows[:, : self.num_rows]

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_new, head_dim]."""
        needed, capacity = self.num_rows + k.shape[1], self._rows.shape[1]
        if needed > capacity:
            grown = k.new_empty(k.shape[0], max(needed, 2 * capacity, _FIRST_CAPACITY), 2, k.shape[-1])
            if self.num_rows:
                grown[:, : self.num_rows] = self.kv
            self._rows = grown
        self._rows[:, self.num_rows : needed, 0] = k
        self._rows[:, self.num_rows : needed, 1] = v
        self.num_rows = needed
