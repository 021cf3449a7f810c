"""One decode step as a list of calls on fixed tensors: the model, written once, for every device.

Each call enqueues work; on a CPU it does it, or notes it on a tape. The list is made once for a batch size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.weights import Linear, ModelWeights
from workers.model.attention import StepAttention
from workers.model.ops import Normed, Readers, Rotation, StepOps, Stream, num_squares


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
        maps: Sequence[Any],  # of each layer, what its queries are predicted by: see `StepOps.predict_query`
        ops: StepOps,
        rows: StepRows,
        dtype: torch.dtype,  # of the step's tensors
    ) -> None:
        self._weights, self._attention, self._maps, self._ops = weights, attention, maps, ops
        self._rows = rows
        spec, batch_size = weights.spec, rows.batch_size

        def zeros(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch_size, *sizes, dtype=dtype, device=weights.device)

        self._stream = Stream(
            hidden=zeros(spec.hidden_size),
            scaled=zeros(spec.hidden_size),
            scaled_ahead=zeros(spec.hidden_size),
            squares=torch.zeros(num_squares(spec.hidden_size), batch_size, device=weights.device),
        )
        half = (len(weights.inverse_frequencies),)
        self.rotation = Rotation(zeros(*half, dtype=torch.float32), zeros(*half, dtype=torch.float32), spec.interleaved)
        heads = (spec.num_q_heads, spec.head_dim)
        self._qkv = zeros(spec.qkv_width)
        self.q, self.attended = zeros(*heads), zeros(*heads)
        self._early = zeros(spec.q_width)
        # two, taken in turn: a layer's predicted query must outlast the prediction of the layer after it
        self.q_ahead = (zeros(*heads), zeros(*heads))
        self._gated = {mlp.intermediate_size: zeros(mlp.intermediate_size) for mlp in (x.mlp for x in spec.layers)}
        self._branch = zeros(spec.hidden_size) if any(layer.post_norm for layer in spec.layers) else None
        self.logits = zeros(spec.vocab_size, dtype=torch.float32)  # [batch_size, vocab_size]
        self.next_ids = zeros(dtype=torch.int64)  # [batch_size]: the likeliest token, or -1

    def calls(self, ahead: bool) -> Iterator[Call]:
        """The step, from token ids to logits. ahead: the attention is told the next layer's predicted queries."""
        num_layers, attends_on_host = len(self._weights.layers), not self._attention.in_graph
        yield Call(partial(self._attention.begin_step, self._rows), on_host=True)
        yield Call(partial(self._begin, ahead))
        for layer_idx in range(num_layers):
            if ahead and layer_idx + 1 < num_layers:
                yield Call(partial(self._predict, layer_idx + 1))
                yield Call(partial(self._look_ahead, layer_idx + 1), attends_on_host)
            yield Call(partial(self._project, layer_idx))
            yield Call(partial(self._attend, layer_idx), attends_on_host)
            yield Call(partial(self._finish_layer, layer_idx, ahead))
        yield Call(self._finish)
        yield Call(partial(self._attention.end_step, self._rows), on_host=True)

    def _begin(self, ahead: bool) -> None:
        weights = self._weights
        self._ops.break_chain()
        self._ops.begin(
            self._rows,
            weights.embedding,
            weights.spec.embedding_multiplier,
            self._stream,
            self._readers(0, ahead),
            weights.inverse_frequencies,
            weights.rope_scale,
            self.rotation,
        )

    def _predict(self, layer_idx: int) -> None:
        """Predict that layer's query from the input of the layer before it."""
        layer, spec, stream = self._weights.layers[layer_idx], self._weights.spec, self._stream
        early = stream.scaled if layer.before_attention is None else stream.scaled_ahead
        q = layer.qkv[0].outputs(0, spec.q_width)
        self._ops.linear(self._normed(layer.before_attention, early), [q], self._early)
        self._ops.predict_query(
            self._early,
            layer.head_norms,
            spec.norm_eps,
            self._maps[layer_idx],
            self._rotation_in(layer_idx),
            self._rows,
            self.q_ahead[layer_idx % 2],
        )

    def _look_ahead(self, layer_idx: int) -> None:
        self._attention.look_ahead(layer_idx, self.q_ahead[layer_idx % 2], self._rows)
        self._ops.break_chain()

    def _project(self, layer_idx: int) -> None:
        """q, k and v of the layer; k and v go to the tails."""
        layer = self._weights.layers[layer_idx]
        self._ops.linear(self._normed(layer.before_attention, self._stream.scaled), layer.qkv, self._qkv)
        self._ops.rotate_append(
            self._qkv,
            layer.head_norms,
            self._weights.spec.norm_eps,
            self._rotation_in(layer_idx),
            self._rows,
            self._attention.tails[layer_idx],
            self.q,
        )

    def _attend(self, layer_idx: int) -> None:
        self._attention.attend(layer_idx, self.q, self._rows, self.attended)
        if not self._attention.in_graph:  # then a graph begins here
            self._ops.break_chain()

    def _finish_layer(self, layer_idx: int, ahead: bool) -> None:
        """Attention's output projection and the MLP."""
        layer, spec = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx]
        attended = self.attended.view(len(self.attended), -1)
        before_mlp = Readers(layer.before_mlp, None, self._weights.spec.norm_eps)
        self._add(attended, layer.out, layer.behind_attention, spec.residual_multiplier, before_mlp)
        gated = self._gated[spec.mlp.intermediate_size]
        x = self._normed(layer.before_mlp, self._stream.scaled)
        self._ops.mlp(x, layer.gate_up, spec.mlp.gated, spec.mlp.activation, gated)
        self._add(gated, layer.down, layer.behind_mlp, spec.residual_multiplier, self._readers(layer_idx + 1, ahead))

    def _add(self, x: Tensor, linear: Linear, norm: Tensor | None, multiplier: float, readers: Readers) -> None:
        """Add what a branch gives to the stream, behind its norm."""
        if norm is None:
            self._ops.linear_add(x, linear, multiplier, self._stream, readers)
            return
        assert self._branch is not None
        self._ops.linear(Normed(x), [linear], self._branch)
        self._ops.add_normed(self._branch, norm, self._weights.spec.norm_eps, multiplier, self._stream, readers)

    def _finish(self) -> None:
        weights, spec = self._weights, self._weights.spec
        self._ops.linear(self._normed(weights.final_norm, self._stream.scaled), [weights.head], self.logits)
        if spec.logit_multiplier != 1.0 or spec.logit_cap is not None:
            self._ops.finish_logits(self.logits, spec.logit_multiplier, spec.logit_cap)
        self._ops.likeliest(self.logits, self.next_ids)

    def advance(self) -> None:
        """Feed the rows their likeliest tokens."""
        self._ops.advance(self._rows, self.next_ids)

    def _normed(self, norm: Tensor | None, x: Tensor) -> Normed:
        """The stream, behind that norm, which whoever wrote it has been told of."""
        return Normed(x) if norm is None else Normed(x, self._stream.squares, self._weights.spec.norm_eps)

    def _readers(self, layer_idx: int, ahead: bool) -> Readers:
        """Those who read a layer's input: the layer, and the prediction of the one after it."""
        layers, eps = self._weights.layers, self._weights.spec.norm_eps
        if layer_idx == len(layers):
            return Readers(self._weights.final_norm, None, eps)
        ahead = ahead and layer_idx + 1 < len(layers)
        norms = [layer.before_attention for layer in layers[layer_idx : layer_idx + 2]]
        return Readers(norms[0], norms[1] if ahead else None, eps)

    def _rotation_in(self, layer_idx: int) -> Rotation | None:
        return self.rotation if self._weights.spec.layers[layer_idx].attention.rotated else None
