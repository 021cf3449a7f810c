"""Rows of a step that attend one at a time, so that no row depends on those beside it.

These are the rows of requests with selectors that csattn is compared with, of requests whose own rows have left the
window without becoming segments, and of all requests whose context is gathered from a store.
"""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.attention import attend, join_sinks, merge_state
from csattn.rest import estimate_rest
from csattn.selection import Selection
from csattn.selector_names import SELECTOR_NAMES
from csattn.selectors.base import require_choice
from csattn.sketch import SketchIndex
from csattn.sketch.rest import attend_rest
from workers.engine.cpu.context import CpuRequest, LayerChoice
from workers.engine.cpu.row_plan import RowPlan
from workers.engine.open_requests import StepCount
from workers.model.cpu.cpu_model import CpuModel

Chosen = Selection | slice  # selected rows, or a range that is streamed
Attended = tuple[Tensor, Tensor]  # out [num_q_heads, head_dim] and lse [num_q_heads], float32


@dataclass(frozen=True, slots=True)
class OwnRead:
    """What a row reads of its request's own segments in one layer."""

    sketch: SketchIndex
    chosen: Selection  # rows of the tail


class RowByRow:
    """Those rows of one step. A step that fails can be run again: requests change at `commit`, lists see `abandon`."""

    def __init__(self, model: CpuModel, plan: RowPlan, tail_lens: NDArray[np.int64], softmax_scale: float) -> None:
        """tail_lens: [num_rows], the rows of its tail that each row sees."""
        self._model, self._plan, self._scale = model, plan, softmax_scale
        of_rows = zip(plan.requests, tail_lens.tolist(), strict=True)
        self._rows = [(row, *of_row) for row, of_row in enumerate(of_rows) if plan.attends_per_row[row]]
        # those that choose alone, not in a search with others
        self.choosing = [of_row for of_row in self._rows if of_row[1].selects_per_row(of_row[2])]
        # by request slot
        self._choices = {request.request_slot: (request, _choices(request)) for _, request, _ in self.choosing}
        self.counts: defaultdict[int, StepCount] = defaultdict(StepCount)  # by row
        self._chosen: dict[int, Selection] = {}  # of the current layer, by row

    def __len__(self) -> int:
        return len(self._rows)

    def choose(self, indexed_idx: int) -> None:
        """Choose for all rows that choose alone, in order within a request: its selector may keep a state."""
        for row, request, tail_len in self.choosing:
            (_, choices), count = self._choices[request.request_slot], self.counts[row]
            choice = choices[indexed_idx]
            tail = self._model.indexed_tails[indexed_idx][request.request_slot]
            num_outside = request.num_outside_window(tail_len)
            while choice.num_appended < num_outside:  # rows that have left the tail's window go to the selector
                k, v = tail[:, choice.num_appended].float().unbind(1)
                choice.selector.append(k.numpy(), v.numpy())
                choice.num_appended += 1
            if (tail_len - 1) % request.view.config.search_period == 0:
                ahead = request.looks_ahead and indexed_idx > 0  # then the token's own row must not be read
                q = (self._model.q_ahead[indexed_idx % 2] if ahead else self._model.q)[row]
                choice.last = choice.selector.select(q, tail[:, num_outside : tail_len - ahead])
                if request.selector not in SELECTOR_NAMES:  # a user's: surplus or duplicate rows would go unnoticed
                    require_choice(request.selector, choice.last, request.view, len(tail), q.shape, num_outside)
                count.searches += 1
                count.search_bytes += choice.selector.search_bytes + (request.predictor_bytes if ahead else 0)
            elif choice.last is None:  # the request's last search was together with others
                of_search = self._plan.selection(row, indexed_idx)
                assert of_search is not None
                choice.last = Selection(of_search[0].copy(), of_search[1].copy())
            self._chosen[row] = choice.last

    def chosen(self, row: int, indexed_idx: int) -> Chosen:
        """Return what a row of the step, alone or not, attends to in the current layer besides the resident rows."""
        if row in self._chosen:
            return self._chosen[row]
        if (of_search := self._plan.selection(row, indexed_idx)) is not None:
            return Selection(*of_search)
        request = self._plan.requests[row]
        middle = request.view.middle
        return middle if request.selector == "full" else slice(middle.start, middle.start)

    def attend(self, indexed_idx: int) -> None:
        """Compute these rows' attention, and write it where the model reads it."""
        streamed = self._attend_streams(indexed_idx)
        for row, request, tail_len in self._rows:
            q = torch.from_numpy(self._model.q[row])
            tail = self._model.indexed_tails[indexed_idx][request.request_slot, :, :tail_len]
            chosen, count = self.chosen(row, indexed_idx), self.counts[row]
            far = streamed[row] if isinstance(chosen, slice) else None
            own = self._plan.owns[row]
            read = None if own is None else OwnRead(own.sketches[indexed_idx], own.selection(row))
            sinks = self._model.sinks[self._model.spec.indexed_layers[indexed_idx]]
            out = attend_row(q, request, indexed_idx, tail, chosen, self._scale, far, read, sinks)
            self._model.attended[row] = out.flatten().numpy()
            count.far_rows += num_far(chosen) + (num_far(read.chosen) if read is not None else 0)
            count.near_rows += request.near[0] + request.view.context_len - request.near[1]
            count.near_rows += tail_len - request.num_outside_window(tail_len) - (own.num_rows if own else 0)

    def prefetch(self, indexed_idx: int) -> None:
        """Let stores read ahead the rows that the next layer will gather, as far as they are chosen."""
        for row, request, tail_len in self._rows:
            if not request.selects_per_row(tail_len) and (chosen := self._plan.selection(row, indexed_idx)) is not None:
                request.context.store.prefetch(indexed_idx, torch.from_numpy(chosen[0]))

    def commit(self) -> None:
        for request, choices in self._choices.values():
            request.choices = choices

    def abandon(self) -> None:
        """Remake lists that may hold rows of this failed step: they take over the earlier rows at the next step."""
        for request, _ in self._choices.values():
            if request.choices is not None and not request.has_selector:
                pairs = zip(request.make_selectors(), request.choices, strict=True)
                request.choices = [LayerChoice(selector, last=choice.last) for selector, choice in pairs]

    def _attend_streams(self, indexed_idx: int) -> dict[int, Attended]:
        """Return the attention of rows that read a range, by row. Rows of one context and range share its stream."""
        together: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, request, _ in self._rows:
            if isinstance(rows := self.chosen(row, indexed_idx), slice):
                together[request.context_id, rows.start, rows.stop].append(row)
        attended: dict[int, Attended] = {}
        for (_, start, stop), members in together.items():
            store = self._plan.requests[members[0]].context.store
            queries = [torch.from_numpy(self._model.q[row]) for row in members]
            cap = self._plan.requests[members[0]].view.logit_cap
            with closing(store.stream(indexed_idx, slice(start, stop))) as pieces:
                of_members = attend_pieces(queries, pieces if stop > start else (), self._scale, cap)
            attended.update(zip(members, of_members, strict=True))
        return attended


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    request: CpuRequest,
    indexed_idx: int,
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]: the rows of it that the row sees
    chosen: Chosen,  # of the context's rows, and of the tail's that have left its window
    softmax_scale: float,
    far: Attended | None = None,  # attention to the chosen range; None: rows are gathered
    own: OwnRead | None = None,  # what the row reads of its own segments
    sinks: Tensor | None = None,  # [num_q_heads] float32: sink logits
) -> Tensor:
    """Attend from a row to sinks, windows, selected rows with their weights, and the rest: [num_q_heads, head_dim]."""
    store, (first, second), num_outside = request.context.store, request.near, request.num_outside_window(tail.shape[1])
    context, cap = (slice(0, first), slice(second, request.view.context_len)), request.view.logit_cap
    recent = num_outside if own is None else own.sketch.context_len
    near = [*(store.rows(indexed_idx, rows).float() for rows in context), tail[:, recent:].float()]
    out, lse = _attend(q, torch.cat(near, dim=1), softmax_scale, cap=cap)
    share = None
    if isinstance(chosen, slice):
        assert far is not None, "a range is streamed"
        out, lse = merge_state(out, lse, *far)
    else:
        kv_indices = torch.from_numpy(chosen.kv_indices)
        rows = _gather(request, indexed_idx, tail, kv_indices)
        weights = None if chosen.log_weights is None else torch.from_numpy(chosen.log_weights)[:, None]
        of_chosen = _attend(q, rows, softmax_scale, (kv_indices >= 0)[:, None], weights, cap)
        out, lse = merge_state(out, lse, *of_chosen)
        if own is not None:
            out, lse = merge_state(out, lse, *_attend_own(q, tail, own, softmax_scale))
        if request.sketches or request.moments:
            out, lse = merge_state(out, lse, *_attend_rest(q, request, indexed_idx, num_outside, chosen, softmax_scale))
        share = chosen.rest
    if sinks is not None:
        out = join_sinks(out, lse, sinks)
    if share is None:
        return out
    of_rest = torch.from_numpy(share.share)[:, None]
    return (1 - of_rest) * out + of_rest * torch.from_numpy(share.out)


def attend_pieces(
    queries: list[Tensor], pieces: Iterable[Tensor], softmax_scale: float, cap: float | None = None
) -> list[Attended]:
    """Attention of each query [num_q_heads, head_dim] to all rows of disjoint pieces.

    pieces: [num_kv_heads, num_rows, 2, head_dim] each, used before the next is taken, and merged by their
    log-sum-exps in their order (the online softmax, arXiv:1805.02867): what is held does not grow with the number of
    pieces. Without any, zeros and -inf.
    """
    attended = [(torch.zeros_like(q), q.new_full(q.shape[:1], -torch.inf)) for q in queries]
    for number, rows in enumerate(pieces):
        wide = rows.float()
        for i, q in enumerate(queries):
            of_piece = _attend(q, wide, softmax_scale, cap=cap)
            attended[i] = merge_state(*attended[i], *of_piece) if number else of_piece
    return attended


def num_far(chosen: Chosen) -> float:
    """Return how many rows per head are fetched."""
    return chosen.stop - chosen.start if isinstance(chosen, slice) else chosen.num_rows / len(chosen.valid_len)


def _choices(request: CpuRequest) -> list[LayerChoice]:
    """Return the request's choices per layer, for one step that may change them."""
    if request.choices is None:
        return [LayerChoice(selector) for selector in request.make_selectors()]
    return [choice.snapshot() for choice in request.choices]


def _attend(
    q: Tensor,
    rows: Tensor,
    softmax_scale: float,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    cap: float | None = None,
) -> Attended:
    """Attend. rows: [num_index_heads, num_rows, 2, head_dim] float32; mask, weights: [num_index_heads, 1, num_rows]."""
    grouped = q.view(1, rows.shape[0], -1, q.shape[1])
    out, lse = attend(grouped, rows[None, :, :, 0], rows[None, :, :, 1], softmax_scale, mask, log_weights, cap)
    return out.view(q.shape), lse.flatten()


def _gather(request: CpuRequest, indexed_idx: int, tail: Tensor, kv_indices: Tensor) -> Tensor:
    """Gather rows of context and tail: [num_index_heads, top_k] -> [num_index_heads, top_k, 2, head_dim] float32."""
    rows, context_len = request.context.store.gather(indexed_idx, kv_indices).float(), request.view.context_len
    in_tail = kv_indices >= context_len
    if in_tail.any():
        head, _ = places = in_tail.nonzero(as_tuple=True)
        kv_head = head // (kv_indices.shape[0] // tail.shape[0])
        rows[places] = tail[kv_head, kv_indices[places].long() - context_len].float()
    return rows


def _attend_own(q: Tensor, tail: Tensor, own: OwnRead, softmax_scale: float) -> Attended:
    """Attend to own segments: to their chosen rows exactly, and to the others by their codes."""
    kv_indices = torch.from_numpy(own.chosen.kv_indices)
    rows = tail.gather(1, kv_indices.clamp_min(0).long()[..., None, None].expand(-1, -1, *tail.shape[2:])).float()
    chosen = _attend(q, rows, softmax_scale, (kv_indices >= 0)[:, None])
    by_token = own.chosen.kv_indices[None], own.chosen.valid_len[None]
    out, lse = attend_rest(q[None].numpy(), own.sketch, *by_token, 0, own.sketch.context_len, softmax_scale)
    return merge_state(*chosen, torch.from_numpy(out[0]), torch.from_numpy(lse[0]))


def _attend_rest(
    q: Tensor, request: CpuRequest, indexed_idx: int, num_outside: int, chosen: Selection, softmax_scale: float
) -> Attended:
    """Attend to the rows that could have been chosen and were not.

    Rows of the tail have no codes and are left out; with moments, they count as if they were the context's.
    """
    (first, second), by_token = request.near, q[None].numpy()
    if request.sketches:
        of_context = (chosen.kv_indices >= 0) & (chosen.kv_indices < request.view.context_len)  # the tail's come last
        num_chosen = of_context.sum(-1, dtype=np.int32)[None]
        sketch, kv_indices = request.sketches[indexed_idx], chosen.kv_indices[None]
        out, lse = attend_rest(by_token, sketch, kv_indices, num_chosen, first, second, softmax_scale)
    else:
        num_rows, moments = np.array([second - first + num_outside]), request.moments[indexed_idx]
        out, lse = estimate_rest(by_token, moments, chosen.valid_len[None], num_rows, softmax_scale)
    return torch.from_numpy(out[0]), torch.from_numpy(lse[0])
