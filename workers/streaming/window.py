"""Sinks and a sliding window (StreamingLLM, arXiv:2309.17453) in constant memory."""

import torch
from torch import Tensor

from csattn.attention import attend, merge_state
from workers.streaming.places import Places
from workers.streaming.sliding import StreamRows


class WindowRows(StreamRows):
    """One layer of one stream: its first sink_len rows and its last window_len.

    Positions are places among the kept rows. Within the window, places differ as the tokens' positions do; only the gap
    between the sinks and the window is closed. So queries are rotated twice: to their own place, for the sinks, and to
    their slot in the window's buffer.
    """

    def __init__(
        self,
        sink_len: int,
        window_len: int,
        block_len: int,  # tokens that attend together
        like: Tensor,  # [num_kv_heads, 0, head_dim]: dtype and device
        places: Places,  # at least sink_len + window_len, and at least window_len - 1 + block_len
    ):
        num_kv_heads, _, head_dim = like.shape
        super().__init__(window_len, block_len, like, places)
        self._sink_len = sink_len
        self._sinks = like.new_empty(2, num_kv_heads, sink_len, head_dim)  # K, rotated (places are fixed); V

    @property
    def num_bytes(self) -> int:
        return self._sinks.nbytes + super().num_bytes

    def _store(self, k: Tensor, v: Tensor) -> None:
        num_sinks = max(0, min(self._sink_len - self.kv_len, k.shape[1]))
        if num_sinks:
            sinks = slice(self.kv_len, self.kv_len + num_sinks)
            self._sinks[0, :, sinks] = self._places.rotate(k[:, :num_sinks], sinks)
            self._sinks[1, :, sinks] = v[:, :num_sinks]
        if num_sinks < k.shape[1]:
            self._slide(k[:, num_sinks:], v[:, num_sinks:])
        self.kv_len += k.shape[1]

    def _attend_block(self, q: Tensor, softmax_scale: float) -> Tensor:
        return merge_state(*self._attend_sinks(q, softmax_scale), *self._attend_window(q, softmax_scale))[0]

    def _attend_sinks(self, q: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attend from the last tokens stored to the sinks.

        q: [num_q_heads, num_tokens, head_dim] -> out, same shape, and lse [num_q_heads, num_tokens].
        """
        num_sinks, first_token = min(self._sink_len, self.kv_len), self.kv_len - q.shape[1]
        tokens = torch.arange(first_token, self.kv_len, device=q.device)
        rotated = self._places.rotate(q, tokens.clamp(max=self._sink_len + self._window_len - 1))
        k, v = self._sinks[:, :, :num_sinks]
        mask = None
        if first_token < num_sinks - 1:
            mask = torch.arange(num_sinks, device=q.device) <= tokens[:, None]
        return _attend_grouped(rotated, k, v, softmax_scale, mask)

    def _attend_window(self, q: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the window, with the shapes of `_attend_sinks`. Tokens that are sinks see no rows of it."""
        num_tokens, end = q.shape[1], self._end
        oldest = max(0, end - (self._window_len - 1) - min(num_tokens, end))
        slots = torch.arange(end - num_tokens, end, device=q.device)  # negative for tokens that are sinks
        rotated = self._places.rotate(q, slots.clamp(min=0))
        mask = None
        if num_tokens > 1:
            age = slots[:, None] - torch.arange(oldest, end, device=q.device)
            mask = (age >= 0) & (age < self._window_len)
        return _attend_grouped(rotated, self._k[:, oldest:end], self._v[:, oldest:end], softmax_scale, mask)

    def __repr__(self) -> str:
        return f"<WindowRows {self.kv_len} tokens, {self._sink_len} + {self._window_len} rows, {self.num_bytes} bytes>"


def _attend_grouped(
    q: Tensor,  # [num_q_heads, num_tokens, head_dim]
    k: Tensor,  # [num_kv_heads, num_rows, head_dim], the same for all tokens
    v: Tensor,
    softmax_scale: float,
    mask: Tensor | None,  # [num_tokens, num_rows] bool: True where a token sees a row
) -> tuple[Tensor, Tensor]:
    """GQA of all tokens over the same rows: out, same shape as q, and lse [num_q_heads, num_tokens]."""
    packed = q.reshape(1, k.shape[0], -1, q.shape[2])  # query heads of a group become queries of their KV head
    if mask is not None:
        mask = mask.repeat(q.shape[0] // k.shape[0], 1)
    out, lse = attend(packed, k[None], v[None], softmax_scale, mask)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])
