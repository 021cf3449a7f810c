"""Heavy hitters and a sliding window (H2O, arXiv:2306.14048) in constant memory."""

import torch
from torch import Tensor

from workers.streaming.places import Places

_BLOCK_LEN = 128  # tokens that attend in one go while nothing has to leave


class HeavyRows:
    """One layer of one stream: in each KV head heavy_len rows of most attention, and the last window_len rows.

    The definition is `reference.heavy_attention`. Positions roll as in the published program's streaming
    form: keys are kept before RoPE and rotated, when they are used, by their place among the rows that the head keeps.
    Where more than one query head reads a KV head, their attention is added up. Once the rows are full, tokens pass one
    at a time, whatever the length of the step: each one's attention decides what the next one finds, so results do not
    depend on how a text is cut.
    """

    def __init__(
        self,
        heavy_len: int,
        window_len: int,
        kv: Tensor,  # [num_kv_heads, 2, 0, head_dim]: shape, dtype and device of the rows
        places: Places,  # heavy_len + window_len of them
    ):
        num_kv_heads, _, _, head_dim = kv.shape
        self._heavy_len, self._window_len = heavy_len, window_len
        self._places = places
        self._max_rows = heavy_len + window_len
        self._rows = kv.new_empty(2, num_kv_heads, self._max_rows, head_dim)  # K, then V; slots in no order
        self._place = torch.zeros(
            num_kv_heads, self._max_rows, dtype=torch.long, device=kv.device
        )  # of each slot's row
        # Attention that each slot's row has had. A float32 of a million would not notice a hundredth any more.
        self._worth = torch.zeros(num_kv_heads, self._max_rows, dtype=torch.float64, device=kv.device)
        self._heads = torch.arange(num_kv_heads, device=kv.device)[:, None]
        self._num_rows = 0
        self._pending: tuple[Tensor, Tensor] | None = None
        self._kv_len = 0

    @property
    def kv_len(self) -> int:
        return self._kv_len

    @property
    def num_bytes(self) -> int:
        """Of memory, whether rows lie there yet or not."""
        return self._rows.nbytes + self._place.nbytes + self._worth.nbytes

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_tokens, head_dim], before RoPE; as many tokens as attend next."""
        assert self._pending is None, "the last step's tokens have not attended"
        self._pending = k, v

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """q: [num_q_heads, num_tokens, head_dim], before RoPE -> out, same shape."""
        assert self._pending is not None, "queries come after their tokens' keys"
        k, v = self._pending
        self._pending = None
        outs, start = [], 0
        while start < q.shape[1]:
            num_tokens = max(1, min(_BLOCK_LEN, q.shape[1] - start, self._max_rows - self._num_rows))
            block = slice(start, start + num_tokens)
            self._store(k[:, block], v[:, block])
            outs.append(self._attend_block(q[:, block], softmax_scale))
            start += num_tokens
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Take in new rows; where there is no room left, one row for which an old one leaves."""
        num_new = k.shape[1]
        if self._num_rows == self._max_rows:
            slots = self._evict()
        else:
            slots = torch.arange(self._num_rows, self._num_rows + num_new, device=k.device).expand(k.shape[0], -1)
        self._rows[0, self._heads, slots], self._rows[1, self._heads, slots] = k, v
        self._place[self._heads, slots] = torch.arange(self._num_rows, self._num_rows + num_new, device=k.device)
        self._worth[self._heads, slots] = 0.0
        self._num_rows += num_new
        self._kv_len += num_new

    def _evict(self) -> Tensor:
        """Let the least worthy row leave that is not recent, of equals the oldest: its slots [num_kv_heads, 1]."""
        worth = self._worth.masked_fill(self._place > self._heavy_len, torch.inf)
        tied = worth == worth.amin(1, keepdim=True)
        slots = self._place.masked_fill(~tied, self._max_rows).argmin(1, keepdim=True)
        self._place -= (self._place > self._place.gather(1, slots)).long()
        self._num_rows -= 1
        return slots

    def _attend_block(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last rows stored: q [num_q_heads, num_tokens, head_dim] -> out, same shape."""
        num_q_heads, num_tokens, head_dim = q.shape
        place = self._place[:, : self._num_rows]
        first_place = self._num_rows - num_tokens
        k = self._places.rotate(self._rows[0, :, : self._num_rows].float(), place)
        rotated_q = self._places.rotate(q.float(), slice(first_place, self._num_rows))
        grouped = rotated_q.reshape(k.shape[0], -1, head_dim)  # the group's heads share their KV head's rows
        scores = (grouped @ k.transpose(1, 2) * softmax_scale).view(k.shape[0], -1, num_tokens, self._num_rows)
        if num_tokens > 1:
            own_place = torch.arange(first_place, self._num_rows, device=q.device)[:, None]
            scores = scores.masked_fill(place[:, None, None] > own_place, -torch.inf)
        weights = scores.softmax(-1)
        self._worth[:, : self._num_rows] += weights.double().sum((1, 2))
        out = weights.flatten(1, 2) @ self._rows[1, :, : self._num_rows].float()
        return out.reshape(num_q_heads, num_tokens, head_dim).to(q.dtype)

    def check(self) -> None:
        """Raise AssertionError if a place is free or taken twice, or worth is lost."""
        taken = self._place[:, : self._num_rows].sort(1).values
        assert (taken == torch.arange(self._num_rows, device=taken.device)).all(), f"{self!r} shares or misses a place"
        assert (self._worth[:, self._num_rows :] == 0).all(), f"{self!r} counts attention where no row is"

    def __repr__(self) -> str:
        rows = f"{self._heavy_len} + {self._window_len} rows"
        return f"<HeavyRows {self._kv_len} tokens, {rows}, {self.num_bytes} bytes>"
