"""The last rows of a sequence, side by side in memory and rotated, in a buffer that does not grow."""

from abc import ABC, abstractmethod

from torch import Tensor

from workers.streaming.places import Places


class SlidingRows:
    """At least the last window_len - 1 rows and those that came last, at most block_len of them in one go.

    Rows follow one another in a buffer that is block_len longer than what is needed of it; at its end they move back
    to the start. A key is rotated to the place that its slot is, so that it has to be rotated again only when it moves,
    and then from what it was before RoPE: errors do not add up. RoPE notices only differences, which are the tokens'
    own as long as queries take the place of their token's slot.
    """

    def __init__(
        self,
        window_len: int,
        block_len: int,
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,  # window_len - 1 + block_len or more
    ):
        num_kv_heads, _, head_dim = like.shape
        self._num_kept = window_len - 1
        self._places = places
        capacity = self._num_kept + block_len
        self.before_rope = like.new_empty(num_kv_heads, capacity, head_dim)
        self.k = like.new_empty(num_kv_heads, capacity, head_dim)  # rotated
        self.v = like.new_empty(num_kv_heads, capacity, head_dim)
        self.end = 0  # rows lie in the slots before this one

    @property
    def num_bytes(self) -> int:
        return self.before_rope.nbytes + self.k.nbytes + self.v.nbytes

    def store(self, k: Tensor, v: Tensor) -> int:
        """k, v: [num_kv_heads, num_tokens, head_dim], before RoPE. Returns by how many slots older rows have moved."""
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
    """One layer of one stream, as `AttendingCache` has it: tokens bring their rows, then they attend."""

    def __init__(
        self,
        window_len: int,
        block_len: int,  # tokens that attend in one go
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,
    ):
        self._window_len, self._block_len, self._places = window_len, block_len, places
        self._window = SlidingRows(window_len, block_len, like, places)
        self._pending: tuple[Tensor, Tensor] | None = None
        self.kv_len = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_tokens, head_dim], before RoPE; as many tokens as attend next."""
        assert self._pending is None, "the last step's tokens have not attended"
        self._pending = k, v

    @property
    def is_amid(self) -> bool:
        """Tokens have brought their rows and not attended to the end."""
        return self._pending is not None

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """q: [num_q_heads, num_tokens, head_dim], before RoPE -> out, same shape."""
        assert self._pending is not None, "queries come after their tokens' keys"
        out = self._attend(q, *self._pending, softmax_scale)
        self._pending = None
        return out

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
        """`attend` of tokens that bring k and v [num_kv_heads, num_tokens, head_dim]."""
