"""One decode step as a list of calls on fixed tensors: the model, written once, for every device.

Each call enqueues work (on a CPU, does it). The list is made once for a batch size; the runner captures it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from csattn.batch import StepRows
from workers.model_runner.attention import StepAttention
from workers.model_runner.ops import Rotation, StepOps, Stream, num_squares
from workers.model_runner.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a step."""

    run: Callable[[], None]
    on_host: bool = False  # at every step; other calls only enqueue work on the device


class StepLayers:
    """The tensors of a step of one batch size, and the calls that compute it."""

    def __init__(
        self,
        weights: ModelWeights,
        attention: StepAttention,
        next_query: Tensor | None,  # [num_contexts, num_layers, num_q_heads, head_dim + 1, head_dim]
        ops: StepOps,
        rows: StepRows,
    ) -> None:
        self._weights, self._attention, self._next_query, self._ops = weights, attention, next_query, ops
        self._rows = rows
        shape, batch_size = weights.shape, rows.batch_size

        def zeros(*sizes: int, dtype: torch.dtype = weights.dtype) -> Tensor:
            return torch.zeros(batch_size, *sizes, dtype=dtype, device=weights.device)

        self._stream = Stream(
            hidden=zeros(shape.hidden_size),
            scaled=zeros(shape.hidden_size),
            scaled_ahead=zeros(shape.hidden_size),
            squares=torch.zeros(num_squares(shape.hidden_size), batch_size, device=weights.device),
        )
        half = (shape.head_dim // 2,)
        self._rotation = Rotation(zeros(*half, dtype=torch.float32), zeros(*half, dtype=torch.float32))
        heads = (shape.num_q_heads, shape.head_dim)
        self._qkv = zeros(shape.qkv_width)
        self._q, self._attended = zeros(*heads), zeros(*heads)
        self._early = zeros(shape.q_width)
        # two, taken in turn: a layer's predicted query must outlast the prediction of the layer after it
        self._q_ahead = (zeros(*heads), zeros(*heads)) if attention.lookahead else None
        self._gated = zeros(shape.intermediate_size)
        self.logits = zeros(shape.vocab_size, dtype=torch.float32)  # [batch_size, vocab_size]
        self.next_ids = zeros(dtype=torch.int64)  # [batch_size]: the likeliest token, or -1

    def calls(self) -> Iterator[Call]:
        """The step, from token ids to logits."""
        num_layers, attends_on_host = len(self._weights.layers), not self._attention.in_graph
        yield Call(partial(self._attention.begin_step, self._rows), on_host=True)
        yield Call(self._begin)
        for layer_idx in range(num_layers):
            if self._attention.lookahead and layer_idx + 1 < num_layers:
                yield Call(partial(self._predict, layer_idx + 1))
                yield Call(partial(self._look_ahead, layer_idx + 1), attends_on_host)
            yield Call(partial(self._project, layer_idx))
            yield Call(partial(self._attend, layer_idx), attends_on_host)
            yield Call(partial(self._finish_layer, layer_idx))
        yield Call(self._finish)
        yield Call(partial(self._attention.end_step, self._rows), on_host=True)

    def _begin(self) -> None:
        weights = self._weights
        self._ops.break_chain()
        self._ops.begin(
            self._rows,
            weights.embedding,
            self._stream,
            *self._norms_before(0),
            weights.inverse_frequencies,
            weights.rope_scale,
            self._rotation,
        )

    def _predict(self, layer_idx: int) -> None:
        """Predict that layer's query from the input of the layer before it."""
        layer, shape, stream = self._weights.layers[layer_idx], self._weights.shape, self._stream
        bias = None if layer.qkv_bias is None else layer.qkv_bias[: shape.q_width]
        self._ops.normed_linear(
            stream.scaled_ahead, stream.squares, shape.norm_eps, layer.qkv[: shape.q_width], bias, self._early
        )
        assert self._next_query is not None and self._q_ahead is not None
        self._ops.predict_query(
            self._early,
            None if layer.head_norms is None else layer.head_norms.q,
            shape.norm_eps,
            self._next_query[:, layer_idx - 1],
            self._rotation,
            self._rows,
            self._q_ahead[layer_idx % 2],
        )

    def _look_ahead(self, layer_idx: int) -> None:
        assert self._q_ahead is not None
        self._attention.look_ahead(layer_idx, self._q_ahead[layer_idx % 2], self._rows)
        self._ops.break_chain()

    def _project(self, layer_idx: int) -> None:
        """q, k and v of the layer; k and v go to the tails."""
        layer, eps, stream = self._weights.layers[layer_idx], self._weights.shape.norm_eps, self._stream
        self._ops.normed_linear(stream.scaled, stream.squares, eps, layer.qkv, layer.qkv_bias, self._qkv)
        tail = self._attention.tails[layer_idx]
        self._ops.rotate_append(self._qkv, layer.head_norms, eps, self._rotation, self._rows, tail, self._q)

    def _attend(self, layer_idx: int) -> None:
        self._attention.attend(layer_idx, self._q, self._rows, self._attended)
        if not self._attention.in_graph:  # then a graph begins here
            self._ops.break_chain()

    def _finish_layer(self, layer_idx: int) -> None:
        """Attention's output projection and the MLP."""
        layer, eps, stream = self._weights.layers[layer_idx], self._weights.shape.norm_eps, self._stream
        attended = self._attended.view(len(self._attended), -1)
        self._ops.linear_add(attended, layer.out, stream, layer.mlp_norm, None)
        self._ops.normed_gate_up(stream.scaled, stream.squares, eps, layer.gate_up, self._gated)
        self._ops.linear_add(self._gated, layer.down, stream, *self._norms_before(layer_idx + 1))

    def _finish(self) -> None:
        weights, stream = self._weights, self._stream
        eps = weights.shape.norm_eps
        self._ops.normed_linear(stream.scaled, stream.squares, eps, weights.head, None, self.logits)
        self._ops.likeliest(self.logits, self.next_ids)

    def advance(self) -> None:
        """Feed the rows their likeliest tokens."""
        self._ops.advance(self._rows, self.next_ids)

    def _norms_before(self, layer_idx: int) -> tuple[Tensor, Tensor | None]:
        """The norms of those who read a layer's input: the layer, and the prediction of the one after it."""
        layers = self._weights.layers
        if layer_idx == len(layers):
            return self._weights.final_norm, None
        ahead = self._attention.lookahead and layer_idx + 1 < len(layers)
        return layers[layer_idx].input_norm, layers[layer_idx + 1].input_norm if ahead else None
