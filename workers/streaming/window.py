"""Sinks and a sliding window (StreamingLLM, arXiv:2309.17453) in constant memory."""

import torch
from torch import Tensor

from csattn.attention import attend, merge_state
from workers.streaming.places import Places


class WindowRows:
    """One layer of one stream: its first sink_len rows and its last window_len. Definition: `reference`.

    Keys are kept before RoPE and rotated, when they are used, by their place among the rows that are kept. The window
    slides through a buffer that is block_len rows longer; at its end it moves back to the start.
    """

    def __init__(
        self,
        sink_len: int,
        window_len: int,
        block_len: int,  # tokens that attend in one go; there are sink_len + window_len + block_len - 1 places or more
        kv: Tensor,  # [num_kv_heads, 2, 0, head_dim]: shape, dtype and device of the rows
        places: Places,
    ):
        num_kv_heads, _, _, head_dim = kv.shape
        self._sink_len, self._window_len, self._block_len = sink_len, window_len, block_len
        self._places = places
        # K, then V: the sinks, then the buffer of the window
        self._rows = kv.new_empty(2, num_kv_heads, sink_len + window_len - 1 + block_len, head_dim)
        self._num_gone = 0  # row r >= sink_len lies in slot r - _num_gone
        self._pending: tuple[Tensor, Tensor] | None = None
        self._kv_len = 0

    @property
    def kv_len(self) -> int:
        return self._kv_len

    @property
    def num_bytes(self) -> int:
        """Of memory, whether rows lie there yet or not."""
        return self._rows.nbytes

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_tokens, head_dim], before RoPE; as many tokens as attend next."""
        assert self._pending is None, "the last step's tokens have not attended"
        self._pending = k, v

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """q: [num_q_heads, num_tokens, head_dim], before RoPE -> out, same shape."""
        assert self._pending is not None, "queries come after their tokens' keys"
        k, v = self._pending
        self._pending = None
        outs = []
        for start in range(0, q.shape[1], self._block_len):
            block = slice(start, start + self._block_len)
            self._store(k[:, block], v[:, block])
            outs.append(self._attend_block(q[:, block], softmax_scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _store(self, k: Tensor, v: Tensor) -> None:
        num_new, capacity = k.shape[1], self._rows.shape[2]
        if self._kv_len - self._num_gone + num_new > capacity:
            num_kept = self._window_len - 1
            end = self._kv_len - self._num_gone
            moved = end - self._sink_len - num_kept
            window = self._rows[:, :, end - num_kept : end].clone()  # old and new place may overlap
            self._rows[:, :, self._sink_len : self._sink_len + num_kept] = window
            self._num_gone += moved
        slots = slice(self._kv_len - self._num_gone, self._kv_len - self._num_gone + num_new)
        self._rows[0, :, slots], self._rows[1, :, slots] = k, v
        self._kv_len += num_new

    def _attend_block(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last rows stored: q [num_q_heads, num_tokens, head_dim] -> out, same shape."""
        tokens = torch.arange(self._kv_len - q.shape[1], self._kv_len, device=q.device)
        sinks = self._attend_sinks(q, tokens, softmax_scale)
        window = self._attend_window(q, tokens, softmax_scale)
        return merge_state(*sinks, *window)[0]

    def _attend_sinks(self, q: Tensor, tokens: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        rows = self._rows[:, :, : min(self._sink_len, self._kv_len)]
        num_sinks, last_place = rows.shape[2], self._sink_len + self._window_len - 1
        k = self._places.rotate(rows[0], slice(0, num_sinks))
        rotated_q = self._places.rotate(q, tokens.clamp(max=last_place))
        first_token = self._kv_len - q.shape[1]
        mask = None
        if first_token < num_sinks - 1:
            mask = torch.arange(num_sinks, device=q.device) <= tokens[:, None]
        return attend_grouped(rotated_q, k, rows[1], softmax_scale, mask)

    def _attend_window(self, q: Tensor, tokens: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        num_tokens = q.shape[1]
        oldest = max(self._sink_len, self._kv_len - num_tokens + 1 - self._window_len)
        num_rows = max(0, self._kv_len - oldest)
        rows = self._rows[:, :, oldest - self._num_gone :][:, :, :num_rows]
        # A token sees its whole window at its true distance, so one numbering serves all tokens of the block: RoPE
        # notices only differences. It is the places' own for the block's first token that sees any of these rows.
        k = self._places.rotate(rows[0], slice(self._sink_len, self._sink_len + num_rows))
        rotated_q = self._places.rotate(q, (tokens - oldest + self._sink_len).clamp(min=0))
        mask = None
        if num_tokens > 1:
            age = tokens[:, None] - torch.arange(oldest, oldest + num_rows, device=q.device)
            mask = (age >= 0) & (age < self._window_len)
        return attend_grouped(rotated_q, k, rows[1], softmax_scale, mask)

    def check(self) -> None:
        """Raise AssertionError if the window is not where it must be."""
        in_use = self._kv_len - self._num_gone
        assert 0 <= in_use <= self._rows.shape[2], f"{self!r} uses slots that it does not have"
        kept = min(self._kv_len, self._sink_len + self._window_len - 1)
        assert in_use >= kept, f"{self!r} has lost a row that the next token sees"

    def __repr__(self) -> str:
        return f"<WindowRows {self._kv_len} tokens, {self._sink_len} + {self._window_len} rows, {self.num_bytes} bytes>"


def attend_grouped(
    q: Tensor,  # [num_q_heads, num_tokens, head_dim]
    k: Tensor,  # [num_kv_heads, num_rows, head_dim], the same for all tokens
    v: Tensor,
    softmax_scale: float,
    mask: Tensor | None,  # [num_tokens, num_rows] bool: True where a token sees a row
) -> tuple[Tensor, Tensor]:
    """out, like q, and lse [num_q_heads, num_tokens]."""
    packed = q.reshape(1, k.shape[0], -1, q.shape[2])  # the group's heads share their KV head's rows
    if mask is not None:
        mask = mask.repeat(q.shape[0] // k.shape[0], 1)
    out, lse = attend(packed, k[None], v[None], softmax_scale, mask)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])
