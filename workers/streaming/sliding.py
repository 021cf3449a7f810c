"""The last rows of a sequence, contiguous in memory and rotated, in a buffer of fixed size."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from workers.streaming.places import Places


class SlidingRows:
    """Holds the rows of the last `store`, of at most block_len tokens, and at least window_len - 1 rows before them.

    Rows are appended to a buffer of window_len - 1 + block_len slots. When it is full, the last window_len - 1 move to
    its start. A key is rotated to the place that is its slot, so it is rotated again only when it moves, and then from
    its value before RoPE: rounding errors do not accumulate. RoPE depends only on differences of places. As long as a
    query takes the place of its token's slot, these equal the differences of the tokens' positions.
    """

    def __init__(
        self,
        window_len: int,
        block_len: int,
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,  # at least window_len - 1 + block_len
    ):
        num_kv_heads, _, head_dim = like.shape
        self._num_kept = window_len - 1
        self._places = places
        capacity = self._num_kept + block_len
        self.before_rope = like.new_empty(num_kv_heads, capacity, head_dim)
        self.k = like.new_empty(num_kv_heads, capacity, head_dim)  # rotated
        self.v = like.new_empty(num_kv_heads, capacity, head_dim)
        self.end = 0  # rows are in the slots below this one

    @property
    def num_bytes(self) -> int:
        return self.before_rope.nbytes + self.k.nbytes + self.v.nbytes

    def store(self, k: Tensor, v: Tensor) -> int:
        """Append rows; returns by how many slots the older rows have moved back.

        k, v: [num_kv_heads, num_tokens, head_dim], before RoPE.
        """
        num_new = k.shape[1]
        moved = 0
        if self.end + num_new > self.k.shape[1]:
            moved = self.end - self._num_kept
            self._move(slice(moved, self.end))
        slots = slice(self.end, self.end + num_new)
        self.before_rope[:, slots], self.v[:, slots] = k, v
        self.k[:, slots] = self._places.rotate(k, slots)
        self.end += num_new
        return moved

    def _move(self, kept: slice) -> None:
        slots = slice(0, kept.stop - kept.start)
        for rows in (self.before_rope, self.v):
            rows[:, slots] = rows[:, kept].clone()  # old and new slots may overlap
        self.k[:, slots] = self._places.rotate(self.before_rope[:, slots], slots)
        self.end = slots.stop


class StreamRows(ABC):
    """One layer of one stream, for `AttendingCache`: `append` takes the tokens' rows, then `attend` their queries."""

    def __init__(
        self,
        window_len: int,
        block_len: int,  # tokens that attend together
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,
    ):
        self._window_len, self._block_len, self._places = window_len, block_len, places
        self._window = SlidingRows(window_len, block_len, like, places)
        self._pending: tuple[Tensor, Tensor] | None = None
        self.kv_len = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """Take the rows of the tokens that attend next.

        k, v: [num_kv_heads, num_tokens, head_dim], before RoPE.
        """
        assert self._pending is None, "the last step's tokens have not attended"
        self._pending = k, v

    @property
    def is_step_open(self) -> bool:
        """Whether a step is incomplete: `append` was called, and `attend` has not finished."""
        return self._pending is not None

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the tokens given to `append`: q [num_q_heads, num_tokens, head_dim], before RoPE -> out, same
        shape."""
        assert self._pending is not None, "queries come after their tokens' keys"
        (k, v), outs, start = self._pending, [], 0
        while start < q.shape[1]:
            block = slice(start, start + self._num_together)
            self._store(k[:, block], v[:, block])
            outs.append(self._attend_block(q[:, block], softmax_scale))
            start = block.stop
        self._pending = None
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    @property
    def _num_together(self) -> int:
        """How many of the next tokens attend together."""
        return self._block_len

    @abstractmethod
    def _store(self, k: Tensor, v: Tensor) -> None:
        """Store the rows of tokens that attend together: [num_kv_heads, num_tokens, head_dim], before RoPE."""

    @abstractmethod
    def _attend_block(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last tokens stored: q [num_q_heads, num_tokens, head_dim], before RoPE -> out, same shape."""
