"""Compressed attention (DeepSeek-V4) in steps on the CPU: what layers keep of requests, and how rows attend.

Rows attend one by one, in torch. A row sees the last rows of its context and of its request, then the compressed rows
of its context and those that its request's tokens have made.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.lightning import CompressedState, Operands, score_all, top_k
from csattn.models.compressed import compressed_queries, compressed_rows, own_rows, pending_of, unrotated
from offload.host_memory import sparse_zeros
from workers.model.cpu.cpu_model import CpuModel


class CompressedOnCpu:
    """All layers of a model, with what each keeps of requests."""

    def __init__(self, model: CpuModel) -> None:
        self._layers = [_Layer(model, layer_idx) for layer_idx in range(model.spec.num_layers)]
        self._contexts: Sequence[Sequence[CompressedState]] = ()
        self._request_slots = self._context_lens = self._tail_lens = torch.empty(0, dtype=torch.int64)

    def begin_request(self, request_slot: int, contexts: Sequence[CompressedState], context_len: int) -> None:
        """Begin a request. contexts: its context's state in each layer."""
        for layer, state in zip(self._layers, contexts, strict=True):
            layer.begin_request(request_slot, state, context_len)

    def set_contexts(self, contexts: Sequence[Sequence[CompressedState]]) -> None:
        """Set the contexts of the next steps' rows: for each row, its context's state in each layer."""
        self._contexts = contexts

    def set_lens(self, request_slots: list[int], context_lens: NDArray[np.int64], tail_lens: NDArray[np.int64]) -> None:
        """Set request slots and lengths of the next step's rows. The rows of a request must be in order."""
        self._request_slots = torch.tensor(request_slots)
        self._context_lens, self._tail_lens = torch.from_numpy(context_lens), torch.from_numpy(tail_lens)

    def attend(self, layer_idx: int) -> None:
        """Compute `attended` from `projected` and `inputs` in the layer's `CompressedBuffers`."""
        states = [of_layers[layer_idx] for of_layers in self._contexts]
        self._layers[layer_idx].attend(states, self._request_slots, self._context_lens, self._tail_lens)


class _Layer:
    """One layer. Requests' own rows are in the model's tails."""

    def __init__(self, model: CpuModel, layer_idx: int) -> None:
        self._spec, self._buffers, self._weights = model.compressed(layer_idx)
        spec = self._spec
        self._own = model.tails[layer_idx].flatten(3)[:, 0]  # [num_tails, tail_capacity, head_dim]
        num_tails, tail_capacity, _ = self._own.shape
        self._dtype, self._scale = self._own.dtype, spec.head_dim**-0.5
        # a ring buffer, by position: a step's tokens must not overwrite those that its compressed rows are made of
        self._num_pending = model.max_rows + spec.span
        width = 2 * sum(spec.compressed_widths)
        self._pending = torch.zeros(num_tails, self._num_pending if spec.ratio else 0, width, dtype=torch.float32)
        num_rows = tail_capacity // spec.ratio + 1 if spec.ratio else 0
        self._rows = _reserved(num_tails, num_rows, spec.head_dim, self._dtype)
        self._keys = _reserved(num_tails, num_rows, spec.index_dim, self._dtype)

    def begin_request(self, request_slot: int, state: CompressedState, context_len: int) -> None:
        if self._spec.ratio:
            positions = torch.arange(context_len - len(state.pending), context_len)
            self._pending[request_slot, positions % self._num_pending] = state.pending

    def attend(
        self, states: list[CompressedState], request_slots: Tensor, context_lens: Tensor, tail_lens: Tensor
    ) -> None:
        spec, weights, buffers, num_rows = self._spec, self._weights, self._buffers, len(request_slots)
        inputs, projected = buffers.inputs[:num_rows], buffers.projected[:num_rows]
        positions = context_lens + tail_lens - 1
        self._own[request_slots, tail_lens - 1] = own_rows(inputs, weights, positions).to(self._dtype)
        if spec.ratio:
            self._compress(inputs, request_slots, positions, context_lens // spec.ratio)
        queries = compressed_queries(projected, inputs, weights, spec, positions)
        attended = torch.empty_like(queries.q)
        for row, (state, request_slot, tail_len) in enumerate(
            zip(states, request_slots.tolist(), tail_lens.tolist(), strict=True)
        ):
            of_context = max(0, min(len(state.window), spec.window - tail_len))
            seen = [state.window[len(state.window) - of_context :], self._own[request_slot, :tail_len][-spec.window :]]
            if spec.ratio:
                num_own = (int(positions[row]) + 1) // spec.ratio - len(state.rows)
                far = state.rows, self._rows[request_slot, :num_own]
                if queries.index_q is not None and queries.index_weights is not None:
                    keys = state.keys, self._keys[request_slot, :num_own]
                    far = self._chosen(queries.index_q[row], queries.index_weights[row], keys, far)
                seen += far
            attended[row] = _attend(queries.q[row], torch.cat(seen).float(), weights.sinks, self._scale)
        buffers.attended[:, :num_rows] = unrotated(attended, weights, spec, positions)

    def _compress(self, inputs: Tensor, request_slots: Tensor, positions: Tensor, num_of_context: Tensor) -> None:
        """Store what the rows add to compressed rows, and make the compressed rows that they complete."""
        spec = self._spec
        self._pending[request_slots, positions % self._num_pending] = pending_of(inputs, spec)
        ends = ((positions + 1) % spec.ratio == 0).nonzero()[:, 0]
        if not len(ends):
            return
        request_slots, last = request_slots[ends], positions[ends]
        span = last[:, None] + torch.arange(1 - spec.span, 1)
        pending = self._pending[request_slots[:, None], span % self._num_pending]
        rows, keys = compressed_rows(pending, self._weights, spec, last + 1 - spec.ratio)
        at = (last + 1) // spec.ratio - 1 - num_of_context[ends]
        self._rows[request_slots, at] = rows.to(self._dtype)
        if keys is not None:
            self._keys[request_slots, at] = keys.to(self._dtype)

    def _chosen(
        self, q: Tensor, head_weights: Tensor, keys: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the compressed rows, of the context and the request's own, with the best index keys."""
        most, num_rows = self._spec.top_k, sum(map(len, rows))
        if num_rows <= most:
            return rows
        operands = [Operands(q[None].to(some.dtype), some, head_weights[None]) for some in keys]
        scores = [score_all(of, torch.tensor([len(of.k)], dtype=torch.int32)) for of in operands]
        chosen = top_k(torch.cat(scores, dim=1), most, order="position")[0].long()
        of_context = chosen < len(rows[0])
        return rows[0][chosen[of_context]], rows[1][chosen[~of_context] - len(rows[0])]


def _reserved(num_tails: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Reserve [num_tails, num_rows, width], which takes memory only where it is written."""
    num_bytes = num_tails * num_rows * width * dtype.itemsize
    return torch.from_numpy(sparse_zeros(num_bytes)).view(dtype).view(num_tails, num_rows, width)


def _attend(q: Tensor, rows: Tensor, sinks: Tensor, softmax_scale: float) -> Tensor:
    """Attention [num_heads, head_dim]. q: of this shape; rows: [num_rows, head_dim], keys and values; all float32."""
    logits = torch.cat((q @ rows.T * softmax_scale, sinks[:, None]), dim=1)
    return logits.softmax(1)[:, :-1] @ rows
