"""A request's own KV rows: its question and what it generated."""

from torch import Tensor

_FIRST_CAPACITY = 128


class TailStore:
    """KV rows of one request in one layer, in order of position; grows by doubling."""

    def __init__(self, like: Tensor):
        """like: context rows [num_kv_heads, ..., 2, head_dim] that give shape, dtype and device."""
        self._rows = like.new_empty(like.shape[0], _FIRST_CAPACITY, 2, like.shape[-1])
        self.num_rows = 0

    def __repr__(self) -> str:
        return f"<TailStore {self.num_rows}/{self._rows.shape[1]} rows>"

    @property
    def kv(self) -> Tensor:
        """All rows: [num_kv_heads, num_rows, 2, head_dim], a view that the next `append` may outdate."""
        return self._rows[:, : self.num_rows]

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_new, head_dim]."""
        needed = self.num_rows + k.shape[1]
        if needed > self._rows.shape[1]:
            grown = self._rows.new_empty(
                self._rows.shape[0], max(needed, 2 * self._rows.shape[1]), *self._rows.shape[2:]
            )
            grown[:, : self.num_rows] = self.kv
            self._rows = grown
        self._rows[:, self.num_rows : needed, 0] = k
        self._rows[:, self.num_rows : needed, 1] = v
        self.num_rows = needed
