"""One decode step in one layer, top to bottom: choose far rows, attend near and far, merge."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from csattn.attention import attend, merge_state
from csattn.rest import Moments, estimate_rest
from csattn.selection import Selection, stack_selections
from csattn.selectors import ContextView, FarRows, Selector
from csattn.sketch import SketchIndex
from csattn.sketch.rest import attend_rest
from offload.kv_store import KvStore
from offload.tail_store import TailStore
from workers.attend_rows import attend_pieces, attend_rows

# Tokens whose far rows are gathered and attended in one go, and how many rows those may be over all heads.
_TOKENS_PER_BLOCK, _ROWS_PER_BLOCK = 16, 1 << 20


@dataclass(slots=True)
class StepCount:
    """What a request has read so far, over all layers."""

    searches: int = 0
    search_s: float = 0.0
    search_bytes: int = 0  # that searches, and attention to the rest, had to read
    far_rows: float = 0.0  # rows per head that were fetched, summed over layers and tokens
    near_rows: float = 0.0  # resident rows per head, likewise


class Observer(Protocol):
    """Sees every layer's queries and what was chosen for them; for evaluation and plots."""

    def __call__(self, layer: "LayerDecoder", q: Tensor, chosen: list[FarRows], out: Tensor) -> None: ...


class LayerDecoder:
    """One request's attention in one layer. `append` the step's keys and values, then `attend`."""

    def __init__(
        self,
        layer_idx: int,
        store: KvStore,
        selector: Selector,
        view: ContextView,
        ahead: Executor,
        count: StepCount,
        clock: Callable[[], float],
        observer: Observer | None = None,
        rest: SketchIndex | Moments | None = None,  # that tells of the middle's rows that are not chosen; None: nothing
    ):
        self.layer_idx = layer_idx
        self.view = view
        self.store = store
        self._selector = selector
        self._ahead = ahead
        self._count = count
        self._clock = clock
        self._observer = observer
        self._rest = rest
        middle = view.middle
        self._sinks = store.rows(layer_idx, slice(0, middle.start))
        self._window = store.rows(layer_idx, slice(middle.stop, view.context_len))
        num_kv_heads, _, _, head_dim = self._window.shape
        self.tail = TailStore(num_kv_heads, head_dim)
        self._num_indexed = 0  # rows of the tail that have left the window into the selector
        self._early: Future[list[FarRows]] | Tensor | None = None  # a search under way, or the query for it
        self._last: FarRows | None = None

    @property
    def kv_len(self) -> int:
        return self.view.context_len + self.tail.num_rows

    @property
    def _tail_window(self) -> int:
        """How many rows of the tail a token sees as resident ones, its own included."""
        return self.view.config.window_len if self._selector.indexes_tail else self.tail.num_rows

    def oldest_resident(self, token: int) -> int:
        """The first row of the tail that is resident for that token of the tail."""
        return max(0, token + 1 - self._tail_window)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_tokens, head_dim], after RoPE."""
        self.tail.append(k, v)

    def look_ahead(self, q: Tensor) -> None:
        """Choose by this query, predicted before the layer's own is known. q: [num_q_heads, num_tokens, head_dim].

        One token's search starts at once. Several tokens' searches wait for the step's keys, which they may need.
        """
        self._early = q if q.shape[1] > 1 else self._ahead.submit(self._choose_ahead, q, self.tail.num_rows)

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last appended tokens. q: [num_q_heads, num_tokens, head_dim] -> out, same shape."""
        early, self._early = self._early, None
        if isinstance(early, Future):
            chosen = early.result()
        else:
            first_token = self.tail.num_rows - q.shape[1]
            chosen = self._choose(q if early is None else early, first_token, ahead=early is not None)
        near_out, near_lse = self._attend_near(q, softmax_scale)
        far_out, far_lse = self._attend_far(q, chosen, softmax_scale)
        out, lse = merge_state(near_out, near_lse, far_out, far_lse)
        if self._rest is not None:
            rest_out, rest_lse = self._attend_rest(q, chosen, self._rest, softmax_scale)
            out, _ = merge_state(out, lse, rest_out, rest_lse)
        out = _mix_in_rest(out.to(q.dtype), chosen)
        if self._observer is not None:
            self._observer(self, q, chosen, out)
        return out

    def _choose(self, q: Tensor, first_token: int, ahead: bool) -> list[FarRows]:
        """The far rows of each token; tokens stand at first_token, first_token + 1, ... of the tail.

        ahead: q is predicted. The token's own row may not be there yet, so that none is looked at.
        """
        started = self._clock()
        rows = []
        by_token = q.detach().float().transpose(0, 1).contiguous().numpy()
        for token, token_q in enumerate(by_token, start=first_token):
            self._move_window(token)
            if self._last is None or token % self.view.config.search_period == 0:
                recent = self.tail.kv[:, self.oldest_resident(token) : token if ahead else token + 1]
                self._last = self._selector.select(token_q, recent)
                self._count.searches += 1
                self._count.search_bytes += self._selector.search_bytes
            rows.append(self._last)
        self._count.search_s += self._clock() - started
        return rows

    def _choose_ahead(self, q: Tensor, token: int) -> list[FarRows]:
        """The next token's far rows, which the store may begin to fetch. q is predicted."""
        chosen = self._choose(q, token, ahead=True)
        for rows in chosen:
            if isinstance(rows, Selection):
                self.store.prefetch(self.layer_idx, torch.from_numpy(rows.kv_indices))
        return chosen

    def _move_window(self, token: int) -> None:
        """Hand rows of the tail that are out of the window of that token to the selector."""
        if not self._selector.indexes_tail:
            return
        while self._num_indexed <= token - self.view.config.window_len:
            k, v = self.tail.kv[:, self._num_indexed].float().unbind(1)
            self._selector.append(k.numpy(), v.numpy())
            self._num_indexed += 1

    def _attend_near(self, q: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attention over sinks, window and the tail's window: out like q, lse [num_q_heads, num_tokens]."""
        num_tokens, num_tail = q.shape[1], self.tail.num_rows
        first_token = num_tail - num_tokens
        oldest = self.oldest_resident(first_token)
        rows = torch.cat([self._sinks, self._window, self.tail.kv[:, oldest:]], dim=1)
        num_fixed = rows.shape[1] - (num_tail - oldest)
        mask = None
        if num_tokens > 1:
            age = torch.arange(first_token, num_tail)[:, None] - torch.arange(oldest, num_tail)
            seen = (age >= 0) & (age < self._tail_window)
            mask = torch.cat([torch.ones(num_tokens, num_fixed, dtype=torch.bool), seen], dim=1)
        self._count.near_rows += rows.shape[1] if mask is None else int(mask.sum())
        return attend_rows(q, rows, softmax_scale, mask)

    def _attend_far(self, q: Tensor, chosen: list[FarRows], softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attention over each token's far rows: out like q, lse [num_q_heads, num_tokens]."""
        if isinstance(chosen[0], slice):
            out, lse, num_rows = attend_pieces(q, self.store.stream(self.layer_idx, chosen[0]), softmax_scale)
            self._count.far_rows += q.shape[1] * num_rows
            return out, lse
        selections = [rows for rows in chosen if isinstance(rows, Selection)]
        outs, lses, start = [], [], 0
        while start < len(selections):
            block = selections[start : start + _tokens_together(selections[start:])]
            of_block = q[:, start : start + len(block)]
            out, lse = self._attend_chosen(of_block, block, softmax_scale)
            outs.append(out)
            lses.append(lse)
            start += len(block)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _attend_chosen(self, q: Tensor, chosen: list[Selection], softmax_scale: float) -> tuple[Tensor, Tensor]:
        """chosen: of each token -> out like q, lse [num_q_heads, num_tokens]."""
        num_q_heads, num_tokens, head_dim = q.shape
        indices, weights = stack_selections(chosen)
        kv_indices = torch.from_numpy(indices)  # [num_tokens, num_index_heads, top_k]
        log_weights = None if weights is None else torch.from_numpy(weights)[:, :, None]
        rows = self.fetch(kv_indices)
        num_index_heads = rows.shape[1]
        self._count.far_rows += float((kv_indices >= 0).sum()) / num_index_heads
        grouped = q.view(num_index_heads, -1, num_tokens, head_dim).permute(2, 0, 1, 3)
        mask = (kv_indices >= 0)[:, :, None] if (kv_indices < 0).any() else None
        out, lse = attend(grouped.to(rows.dtype), rows[..., 0, :], rows[..., 1, :], softmax_scale, mask, log_weights)
        out = out.permute(1, 2, 0, 3).reshape(num_q_heads, num_tokens, head_dim)
        return out, lse.permute(1, 2, 0).reshape(num_q_heads, num_tokens)

    def _attend_rest(
        self, q: Tensor, chosen: list[FarRows], rest: SketchIndex | Moments, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention to the rows that each token could have chosen and did not: out like q, lse like q's first axes.

        Rows that have left the tail's window have no codes and are left out; to moments they are like the context's.
        """
        num_tokens, middle = q.shape[1], self.view.middle
        by_token = q.detach().float().transpose(0, 1).contiguous().numpy()
        selections = [rows for rows in chosen if isinstance(rows, Selection)]
        if isinstance(rest, SketchIndex):
            kv_indices, _ = stack_selections(selections)
            of_context = (kv_indices >= 0) & (kv_indices < self.view.context_len)  # rows of the tail are the last ones
            num_chosen = of_context.sum(-1, dtype=np.int32)
            out, lse = attend_rest(by_token, rest, kv_indices, num_chosen, middle.start, middle.stop, softmax_scale)
        else:
            first_token = self.tail.num_rows - num_tokens
            num_chosen = np.stack([selection.valid_len for selection in selections])
            num_rows = [middle.stop - middle.start + self.oldest_resident(first_token + i) for i in range(num_tokens)]
            out, lse = estimate_rest(by_token, rest, num_chosen, np.array(num_rows, np.int64), softmax_scale)
        self._count.search_bytes += num_tokens * rest.num_bytes
        return torch.from_numpy(out).transpose(0, 1), torch.from_numpy(lse).T

    def fetch(self, kv_indices: Tensor) -> Tensor:
        """Rows of context and tail: [..., num_index_heads, top_k] -> [..., num_index_heads, top_k, 2, head_dim]."""
        rows = self.store.gather(self.layer_idx, kv_indices)
        in_tail = kv_indices >= self.view.context_len
        if in_tail.any():
            kv = self.tail.kv
            *_, head, _ = places = in_tail.nonzero(as_tuple=True)
            kv_head = head // (kv_indices.shape[-2] // kv.shape[0])
            rows[places] = kv[kv_head, kv_indices[places].long() - self.view.context_len].to(rows.dtype)
        return rows


def _tokens_together(selections: list[Selection]) -> int:
    """How many of the next tokens' far rows may be gathered in one go; at least one's."""
    sizes = np.cumsum([selection.kv_indices.size for selection in selections[:_TOKENS_PER_BLOCK]])
    return max(1, int((sizes <= _ROWS_PER_BLOCK).sum()))


def _mix_in_rest(out: Tensor, chosen: list[FarRows]) -> Tensor:
    """Give estimates of what was not selected their share of each token's output. out: like `attend`'s, changed."""
    for token, rows in enumerate(chosen):
        if isinstance(rows, Selection) and rows.rest is not None:
            share = torch.from_numpy(rows.rest.share)[:, None]
            out[:, token] = (1 - share) * out[:, token] + share * torch.from_numpy(rows.rest.out)
    return out
