"""Rows of requests with other selectors than csattn: one at a time, so that no row depends on those beside it."""

from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.attention import attend, merge_state
from csattn.rest import estimate_rest
from csattn.selection import Selection
from csattn.selectors import Selector
from csattn.sketch.rest import attend_rest
from workers.cpu_model.model import CpuModel
from workers.engine.cpu_context import CpuRequest
from workers.engine.row_plan import RowPlan


class PlainRows:
    """Those rows of one step. Selectors move on with `commit` only, so that a step that fails can be run again."""

    def __init__(self, model: CpuModel, plan: RowPlan, tail_lens: NDArray[np.int64], softmax_scale: float) -> None:
        """tail_lens: [num_rows], what each row sees of its tail."""
        self._model, self._scale = model, softmax_scale
        of_rows = zip(plan.requests, tail_lens.tolist(), strict=True)
        self._rows = [(row, *of_row) for row, of_row in enumerate(of_rows) if of_row[0].selectors is not None]
        self._requests = {request.slot: request for _, request, _ in self._rows}
        self._selectors: dict[int, list[Selector]] = {
            slot: [copy(selector) for selector in request.selectors or ()] for slot, request in self._requests.items()
        }
        self.chosen: dict[int, Selection] = {}  # of the layer at hand, by row

    def choose(self, layer_idx: int) -> None:
        """Rows of one request in their order, for a selector may remember what it was asked."""
        for row, request, tail_len in self._rows:
            ahead = request.looks_ahead and layer_idx > 0
            q = (self._model.q_ahead[layer_idx % 2] if ahead else self._model.q)[row]
            recent = self._model.tails[layer_idx, request.slot, :, : tail_len - ahead]
            chosen = self._selectors[request.slot][layer_idx].select(q, recent)
            assert isinstance(chosen, Selection), f"{request.selector} has a range of rows to attend to"
            self.chosen[row] = chosen

    def attend(self, layer_idx: int) -> None:
        """Write what these rows attend to where the model reads it."""
        for row, request, tail_len in self._rows:
            q = torch.from_numpy(self._model.q[row])
            tail = self._model.tails[layer_idx, request.slot, :, :tail_len]
            out = attend_row(q, request, layer_idx, tail, self.chosen[row], self._scale)
            self._model.attended[row] = out.flatten().numpy()

    def commit(self) -> None:
        for slot, request in self._requests.items():
            request.selectors = self._selectors[slot]


def attend_row(
    q: Tensor,  # [num_q_heads, head_dim] float32
    request: CpuRequest,
    layer_idx: int,
    tail: Tensor,  # [num_kv_heads, tail_len, 2, head_dim]
    chosen: Selection,  # of the context's rows
    softmax_scale: float,
) -> Tensor:
    """Attention to sinks, window, tail and selected rows, with their weights and the rest: [num_q_heads, head_dim]."""
    store, (first, second) = request.context.store, request.near

    def over(rows: Tensor, mask: Tensor | None, log_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows: [num_index_heads, num_rows, 2, head_dim]; mask and weights [num_index_heads, 1, num_rows]."""
        grouped = q.view(1, rows.shape[0], -1, q.shape[1])
        out, lse = attend(grouped, rows[None, :, :, 0], rows[None, :, :, 1], softmax_scale, mask, log_weights)
        return out.view(q.shape), lse.flatten()

    context = slice(0, first), slice(second, request.view.context_len)
    near = torch.cat([*(store.rows(layer_idx, rows).float() for rows in context), tail.float()], dim=1)
    kv_indices = torch.from_numpy(chosen.kv_indices)
    far = store.gather(layer_idx, kv_indices).float()
    weights = None if chosen.log_weights is None else torch.from_numpy(chosen.log_weights)[:, None]
    out, lse = merge_state(*over(near, None, None), *over(far, (kv_indices >= 0)[:, None], weights))
    if request.sketches or request.moments:
        out, _ = merge_state(out, lse, *_attend_rest(q, request, layer_idx, chosen, softmax_scale))
    if chosen.rest is None:
        return out
    share = torch.from_numpy(chosen.rest.share)[:, None]
    return (1 - share) * out + share * torch.from_numpy(chosen.rest.out)


def _attend_rest(
    q: Tensor, request: CpuRequest, layer_idx: int, chosen: Selection, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the rows that are neither near nor chosen: out like q, lse [num_q_heads]."""
    (first, second), by_token, num_chosen = request.near, q[None].numpy(), chosen.valid_len[None]
    if request.sketches:
        sketch, kv_indices = request.sketches[layer_idx], chosen.kv_indices[None]
        out, lse = attend_rest(by_token, sketch, kv_indices, num_chosen, first, second, softmax_scale)
    else:
        num_rows, moments = np.array([second - first]), request.moments[layer_idx]
        out, lse = estimate_rest(by_token, moments, num_chosen, num_rows, softmax_scale)
    return torch.from_numpy(out[0]), torch.from_numpy(lse[0])
