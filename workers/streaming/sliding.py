"""What all streams keep: the last rows, contiguous in memory and rotated, in a buffer of fixed size."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from workers.streaming.places import Places


class StreamRows(ABC):
    """One layer of one stream, for `AttendingCache`: `append` takes the tokens' rows, then `attend` their queries.

    Holds the rows of the last tokens that attended together, at most block_len, and at least window_len - 1 before
    them. Rows are appended to a buffer of window_len - 1 + block_len slots. When it is full, the last window_len - 1
    move to its start. A key is rotated to the place that is its slot, so it is rotated again only when it moves, and
    then from its value before RoPE: rounding errors do not accumulate. RoPE depends only on differences of places. As
    long as a query takes the place of its token's slot, these equal the differences of the tokens' positions.
    """

    def __init__(
        self,
        window_len: int,
        block_len: int,  # tokens that attend together
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,  # at least window_len - 1 + block_len
    ):
        num_kv_heads, _, head_dim = like.shape
        self._window_len, self._block_len, self._places = window_len, block_len, places
        sizes = num_kv_heads, window_len - 1 + block_len, head_dim
        self._before_rope, self._k, self._v = (like.new_empty(sizes) for _ in range(3))  # k: rotated
        self._end = 0  # rows are in the slots below this one
        self._pending: tuple[Tensor, Tensor] | None = None
        self.kv_len = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory allocated, whether filled yet or not."""
        return self._before_rope.nbytes + self._k.nbytes + self._v.nbytes

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

    def _slide(self, k: Tensor, v: Tensor) -> int:
        """Append rows to the window's buffer; returns by how many slots the older rows have moved back.

        k, v: [num_kv_heads, num_tokens, head_dim], before RoPE.
        """
        num_new, num_kept, moved = k.shape[1], self._window_len - 1, 0
        if self._end + num_new > self._k.shape[1]:
            moved = self._end - num_kept
            for rows in (self._before_rope, self._v):
                rows[:, :num_kept] = rows[:, moved : self._end].clone()  # old and new slots may overlap
            self._k[:, :num_kept] = self._places.rotate(self._before_rope[:, :num_kept], slice(0, num_kept))
            self._end = num_kept
        slots = slice(self._end, self._end + num_new)
        self._before_rope[:, slots], self._v[:, slots] = k, v
        self._k[:, slots] = self._places.rotate(k, slots)
        self._end += num_new
        return moved
