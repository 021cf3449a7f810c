"""Heavy hitters and a sliding window (H2O, arXiv:2306.14048) in constant memory."""

import torch
from torch import Tensor

from workers.streaming.places import Places
from workers.streaming.sliding import StreamRows


class HeavyRows(StreamRows):
    """One layer of one stream: in each KV head, the heavy_len rows with most attention, and the last window_len rows.

    Positions roll as in the published program's streaming form: they are places among the rows that the head keeps,
    oldest first. So all heavy rows precede the window, and a place changes only if a row before it is evicted. A row's
    attention is summed over the query heads of its KV head's group (GQA). Once the window is full, tokens attend one at
    a time, however long the step is: the attention of each decides which rows the next one finds. So results do not
    depend on how a text is cut into steps.
    """

    def __init__(
        self,
        heavy_len: int,
        window_len: int,
        block_len: int,  # tokens that attend together while the window fills
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,  # at least heavy_len + window_len, and at least window_len - 1 + block_len
    ):
        num_kv_heads, _, head_dim = like.shape
        super().__init__(window_len, block_len, like, places)
        self._heavy_len = heavy_len
        shape = (num_kv_heads, self._k.shape[1])
        # Accumulated attention of each row. In float32, adding 0.01 to a million would change nothing.
        self._window_mass = torch.zeros(shape, dtype=torch.float64, device=like.device)
        self._heavy_mass = torch.zeros(num_kv_heads, heavy_len, dtype=torch.float64, device=like.device)
        self._heavy_before_rope = like.new_empty(num_kv_heads, heavy_len, head_dim)  # heavy rows' keys, by place
        self._heavy_k = like.new_empty(num_kv_heads, heavy_len, head_dim)
        self._heavy_v = like.new_empty(num_kv_heads, heavy_len, head_dim)
        self._num_heavy = 0

    @property
    def num_bytes(self) -> int:
        heavy = (self._heavy_before_rope, self._heavy_k, self._heavy_v, self._heavy_mass, self._window_mass)
        return super().num_bytes + sum(tensor.nbytes for tensor in heavy)

    @property
    def _num_together(self) -> int:
        return max(1, min(self._block_len, self._window_len - self.kv_len))

    def _store(self, k: Tensor, v: Tensor) -> None:
        if self.kv_len >= self._window_len:
            self._retire(self._end - self._window_len)
        num_new, moved = k.shape[1], self._slide(k, v)
        end = self._end
        if moved:
            old = end - num_new
            self._window_mass[:, :old] = self._window_mass[:, moved : moved + old].clone()
        self._window_mass[:, end - num_new : end] = 0.0
        self.kv_len += num_new

    def _retire(self, slot: int) -> None:
        """Move the row in that slot out of the window: it becomes a heavy row if there is room, or in place of the
        heavy row with the least attention if that has no more than this one."""
        if self._num_heavy < self._heavy_len:
            self._num_heavy += 1
            for head in range(len(self._heavy_k)):
                self._insert(head, self._num_heavy - 1, slot)
        elif self._heavy_len:
            least = self._heavy_mass.argmin(1)  # of equal ones the first, which is the oldest
            enters = self._heavy_mass.gather(1, least[:, None])[:, 0] <= self._window_mass[:, slot]
            for head in enters.nonzero()[:, 0].tolist():
                self._insert(head, int(least[head]), slot)

    def _insert(self, head: int, place: int, slot: int) -> None:
        """Evict the heavy row at that place, move those after it up, and append the window's row."""
        heavy = slice(place, self._num_heavy)
        for rows, new in (
            (self._heavy_before_rope, self._before_rope),
            (self._heavy_v, self._v),
            (self._heavy_mass, self._window_mass),
        ):
            rows[head, heavy] = torch.cat([rows[head, place + 1 : self._num_heavy], new[head, slot : slot + 1]])
        self._heavy_k[head, heavy] = self._places.rotate(self._heavy_before_rope[head, heavy], heavy)

    def _attend_block(self, q: Tensor, softmax_scale: float) -> Tensor:
        num_kv_heads, num_tokens, end = len(self._heavy_k), q.shape[1], self._end
        oldest = max(0, end - self._window_len)
        last_place = self._num_heavy + end - oldest - 1
        heavy, window = slice(0, self._num_heavy), slice(oldest, end)
        own_place, slots = slice(last_place, last_place + 1), slice(end - num_tokens, end)
        to_heavy, to_window = (
            self._places.rotate(q, places).reshape(num_kv_heads, -1, q.shape[2]) for places in (own_place, slots)
        )
        # in float32: products of queries and keys may exceed the largest float16
        heavy_scores = to_heavy.float() @ self._heavy_k[:, heavy].float().transpose(1, 2)
        window_scores = to_window.float() @ self._k[:, window].float().transpose(1, 2)
        scores = torch.cat([heavy_scores, window_scores], dim=2)
        if num_tokens > 1:  # only while the window fills, so that there are no heavy rows
            tokens = torch.arange(end, device=q.device)
            unseen = tokens > tokens[slots, None]
            scores = scores.masked_fill(unseen.repeat(scores.shape[1] // num_tokens, 1), -torch.inf)
        weights = (scores * softmax_scale).softmax(-1)
        mass = weights.sum(1, dtype=torch.float64)
        self._heavy_mass[:, heavy] += mass[:, heavy]
        self._window_mass[:, window] += mass[:, self._num_heavy :]
        shares = weights.to(q.dtype)
        out = shares[:, :, : self._num_heavy] @ self._heavy_v[:, heavy]
        out += shares[:, :, self._num_heavy :] @ self._v[:, window]
        return out.reshape(q.shape)

    def __repr__(self) -> str:
        rows = f"{self._heavy_len} + {self._window_len} rows"
        return f"<HeavyRows {self.kv_len} tokens, {rows}, {self.num_bytes} bytes>"
