"""One decode step as a list of calls on fixed tensors: the model, written once, for every device.

Each call enqueues work on a GPU; on a CPU it does the work, or records it on a tape. The list is made once for each
batch size.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.models.query import Queries, Rotation
from csattn.models.spec import ExpertsSpec, HeadsSpec, StreamsSpec
from csattn.models.weights import (
    CompressedStepWeights,
    LatentWeights,
    LayerInputWeights,
    Linear,
    ModelWeights,
    StreamWeights,
)
from workers.model.attention import StepAttention
from workers.model.devices import Devices
from workers.model.ops import (
    CompressedBuffers,
    ExpertBuffers,
    HeadBuffers,
    LatentBuffers,
    Normed,
    Readers,
    RecurrentBuffers,
    Stream,
    StreamsBuffers,
    num_squares,
)

if TYPE_CHECKING:  # a device has one of these
    from workers.model.cpu.tape_ops import TapeOps
    from workers.model.gpu.triton_ops import TritonOps
    from workers.model.torch_ops import TorchOps

    StepOps = TorchOps | TapeOps | TritonOps


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step."""

    run: Callable[[], None]
    on_host: bool = False  # runs on the host at every step; other calls only enqueue work on the device
    attends_in: int | None = None  # the layer whose attention this call is, if any


class StepLayers:
    """The tensors of a step of one batch size, and the calls that compute it."""

    def __init__(
        self,
        weights: ModelWeights,
        attention: StepAttention,
        maps: Sequence[Any],  # for each layer, the maps that predict its queries: see `TorchOps.predict_query`
        ops: "StepOps",
        rows: StepRows,
        dtype: torch.dtype,  # of the step's tensors
        devices: Devices | None = None,  # the devices that share the model, if the weights are this device's share
    ) -> None:
        self._weights, self._attention, self._maps, self._ops = weights, attention, maps, ops
        self._rows, self._devices = rows, devices
        spec, batch_size = weights.spec, rows.batch_size

        def zeros(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch_size, *sizes, dtype=dtype, device=weights.device)

        self._stream = Stream(
            hidden=zeros(spec.hidden_size),
            scaled=zeros(spec.hidden_size),
            scaled_ahead=zeros(spec.hidden_size),
            squares=torch.zeros(num_squares(spec.hidden_size), batch_size, dtype=torch.float32, device=weights.device),
            centred=spec.centred,
            tile_sums=None if devices is None else devices.exchange(batch_size, spec.hidden_size),
            row_sums=None if devices is None else devices.exchange(batch_size, spec.hidden_size),
        )
        self._streams = None if spec.streams is None else _streams_buffers(spec.streams, spec.hidden_size, zeros)
        self.rotations = []
        for rope, frequencies in zip(spec.ropes, weights.ropes, strict=True):
            cos, sin = (zeros(len(frequencies.angles), dtype=torch.float32) for _ in range(2))
            q_scale = torch.ones(batch_size, dtype=torch.float32, device=weights.device)
            self.rotations.append(Rotation(cos, sin, q_scale, rope.interleaved))
        heads = (spec.num_q_heads, spec.head_dim)
        is_gated = any(layer.attention.gated for layer in spec.layers)
        kinds_of_heads = {spec.heads, *map(spec.heads_of, range(spec.num_layers))}
        lends = bool(spec.kv_sources)
        self._heads = {of_heads: _head_buffers(of_heads, is_gated, lends, zeros) for of_heads in kinds_of_heads}
        self._early = zeros(spec.heads.q_width)
        # two buffers in turn: a layer's predicted query must outlast the prediction for the layer after it
        self.q_ahead = (zeros(*heads), zeros(*heads))
        widths = {layer.mlp.intermediate_size for layer in spec.layers if layer.mlp is not None}
        self._gated = {width: zeros(width) for width in widths}
        kinds = {(number, experts) for layer in spec.layers for number, experts in enumerate(layer.experts)}
        self._experts = {kind: expert_buffers(kind[1], spec.hidden_size, zeros) for kind in kinds}
        recurrent = {layer.recurrent for layer in spec.layers if layer.recurrent is not None}
        self._recurrent = {
            of: RecurrentBuffers(zeros(of.in_width), zeros(of.num_channels), zeros(of.out_width)) for of in recurrent
        }
        latents = {layer.latent for layer in spec.layers if layer.latent is not None}
        self._latents = {latent: _latent_buffers(latent, zeros) for latent in latents}
        self._compressed = {compressed: _compressed_buffers(compressed, zeros) for compressed in set(spec.compressed)}
        self._branch: Tensor | None = None  # a branch's output, where a product does not add it to the stream itself
        if devices is not None:
            self._branch = zeros(spec.hidden_size, dtype=torch.float32)
        elif any(layer.post_norm for layer in spec.layers):
            self._branch = zeros(spec.hidden_size)
        width = spec.layer_input_width
        self._inputs = torch.zeros(spec.num_layers, batch_size, width, dtype=dtype, device=weights.device)
        self._projected, self._input_gates = zeros(spec.num_layers * width), zeros(width)
        # the input and the output of experts that have norms of their own (`ExpertsSpec.has_own_norms`)
        self._expert_io = [zeros(spec.hidden_size) for _ in range(2 * any(x.has_own_norms for _, x in kinds))]
        self.logits = zeros(spec.vocab_size, dtype=torch.float32)  # [batch_size, vocab_size]
        self._logits_part: Tensor | None = None  # the logits of this device's share of the vocabulary
        if len(weights.head.weight) < spec.vocab_size:
            assert devices is not None, "somebody has the others"
            self._logits_part = devices.shared_zeros(batch_size, len(weights.head.weight))
        self.next_ids = zeros(dtype=torch.int64)  # [batch_size]: the argmax of the logits, or -1
        # [batch_size, hidden_size]: after the last layer, what the logits are computed from
        self.last_hidden = self._stream.scaled

    def with_rows(self, rows: StepRows) -> "StepLayers":
        """Return the same step on the same tensors. rows: the same tensors too, with other flags."""
        other = copy(self)
        other._rows = rows
        return other

    def calls(self, ahead: bool) -> Iterator[Call]:
        """Yield the calls of the step, from token ids to logits. ahead: predict the next layer's queries, and pass
        them to the attention."""
        spec, attends_on_host = self._weights.spec, not self._attention.in_graph
        yield Call(partial(self._attention.begin_step, self._rows), on_host=True)
        yield Call(partial(self._begin, ahead))
        for layer_idx in range(spec.num_layers):
            if ahead and spec.is_predicted(layer_idx + 1):
                yield Call(partial(self._predict, layer_idx + 1))
                yield Call(partial(self._look_ahead, layer_idx + 1), attends_on_host)
            yield Call(partial(self._project, layer_idx))
            yield Call(partial(self._attend, layer_idx), attends_on_host, layer_idx)
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
        )
        if weights.inputs is not None:
            self._ops.linear(Normed(self._stream.hidden), [weights.inputs.projection], self._projected)
            self._ops.make_inputs(self._projected, weights.inputs, self._rows, self._inputs)
            self._ops.break_chain()  # `compute_rotation` takes no part in programmatic dependent launch
        for rope, frequencies, rotation in zip(weights.spec.ropes, weights.ropes, self.rotations, strict=True):
            self._ops.compute_rotation(self._rows, frequencies, rope.temper, rotation)

    def _predict(self, layer_idx: int) -> None:
        """Predict the query of layer `layer_idx` from the input of the layer before it."""
        layer, spec, stream = self._weights.layers[layer_idx], self._weights.spec, self._stream
        assert spec.streams is None, "of several, a layer reads a mixture of its own"
        early = stream.scaled if layer.input_norm is None else stream.scaled_ahead
        self._ops.linear(self._normed(layer.input_norm, early), _first(layer.qkv, spec.heads.q_width), self._early)
        self._ops.predict_query(
            self._early,
            layer.head_norms,
            self._maps[layer_idx],
            self._rotation_in(layer_idx),
            self._rows,
            self._q_ahead(layer_idx),
        )

    def _look_ahead(self, layer_idx: int) -> None:
        self._attention.look_ahead(layer_idx, self._q_ahead(layer_idx), self._rows)
        self._ops.break_chain()

    def _project(self, layer_idx: int) -> None:
        """Compute q, k and v of the layer; k and v go to the tails."""
        layer, spec = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx]
        if spec.mlp_only:
            return
        self._remix(layer.attention_mix, self._readers(layer_idx, ahead=False), is_first=layer_idx == 0)
        x = self._normed(layer.input_norm, self._stream.scaled)
        if layer.recurrent is not None and spec.recurrent is not None:
            self._ops.linear(x, layer.recurrent.inputs, self._recurrent[spec.recurrent].inputs)
            return
        if layer.latent is not None:
            self._project_latents(layer_idx, x, layer.latent)
            return
        if layer.compressed is not None:
            self._project_compressed(layer_idx, x, layer.compressed)
            return
        heads, tails = self.heads(layer_idx), self._attention.tails
        kv_source = spec.attention.rows_of
        projected = heads.qkv if kv_source is None else heads.q_only
        assert projected is not None
        self._ops.linear(x, layer.qkv, projected)
        if layer.gates:
            assert heads.gates is not None
            self._ops.linear(x, layer.gates, heads.gates)
        self._ops.rotate_append(
            projected,
            layer.head_norms,
            self._rotation_in(layer_idx),
            self._rows,
            tails[layer_idx] if kv_source is None else None,
            heads.q,
        )
        if kv_source is not None:
            self._ops.copy_rows(tails[kv_source], tails[layer_idx], self._rows)

    def _project_latents(self, layer_idx: int, x: Normed, weights: LatentWeights) -> None:
        spec, buffers = self._weights.spec.layers[layer_idx].latent, self.latents(layer_idx)
        rotation = self._rotation_in(layer_idx)
        assert buffers is not None and spec is not None and rotation is not None
        self._ops.linear(x, weights.inputs, buffers.inputs)
        tail = self._attention.tails[layer_idx]
        self._ops.append_latents(weights, spec, rotation, self._rows, tail, buffers)
        if weights.queries:
            self._ops.linear(Normed(buffers.q_latents), weights.queries, buffers.projected)
        self._ops.project_latent_queries(weights, spec, rotation, buffers)

    def _project_compressed(self, layer_idx: int, x: Normed, weights: CompressedStepWeights) -> None:
        buffers = self.compressed(layer_idx)
        assert buffers is not None
        self._ops.linear(x, [weights.latents], buffers.latents)
        self._ops.norm(buffers.latents, weights.latent_norm, buffers.normed)
        self._ops.linear(Normed(buffers.normed), weights.queries, buffers.projected)
        self._ops.linear(x, weights.inputs, buffers.inputs)

    def heads(self, layer_idx: int) -> HeadBuffers:
        """Return the buffers of a layer whose heads attend to plain KV rows."""
        return self._heads[self._weights.spec.heads_of(layer_idx)]

    def latents(self, layer_idx: int) -> LatentBuffers | None:
        """Return the buffers of a layer of latent attention (MLA), None for other layers."""
        latent = self._weights.spec.layers[layer_idx].latent
        return None if latent is None else self._latents[latent]

    def compressed(self, layer_idx: int) -> CompressedBuffers | None:
        """Return the buffers of a layer of compressed attention, None for other layers."""
        spec = self._weights.spec.layers[layer_idx].compressed
        return None if spec is None else self._compressed[spec]

    def _attend(self, layer_idx: int) -> None:
        if (of_rows := self.compressed(layer_idx)) is not None:
            self._attention.attend_compressed(layer_idx, of_rows, self._rows)
            self._ops.break_chain()
            return
        if (buffers := self.latents(layer_idx)) is not None:
            self._attention.attend_latents(layer_idx, buffers.queries, self._rows, buffers.attended)
        else:
            heads = self.heads(layer_idx)
            self._attention.attend(layer_idx, heads.q, self._rows, heads.attended)
        # work on other streams has joined, or a graph begins here
        if buffers is not None or not self._attention.in_graph:
            self._ops.break_chain()

    def _finish_layer(self, layer_idx: int, ahead: bool) -> None:
        """Compute attention's output projection and the MLP, if the layer has both, and add them to the stream."""
        layer, spec = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx]
        adds = list[Callable[[Readers], None]]()
        if layer.out is not None:
            attended, times = self._attended(layer_idx), spec.residual_multiplier
            add_attended = partial(self._add, attended, layer.out, layer.post_attention_norm, times)
            if spec.has_mlp and not spec.parallel:  # the MLP reads the stream after attention
                pre_mlp_norm = Readers(layer.pre_mlp_norm)
                add_attended(pre_mlp_norm)
                self._remix(layer.mlp_mix, pre_mlp_norm)
            else:
                adds.append(add_attended)
        assert not spec.parallel or self._streams is None, "the MLP reads a mixture of its own"
        *others, last = *adds, *self._mlps(layer_idx)
        for add in others:
            add(Readers(None))
        last(self._readers(layer_idx + 1, ahead))
        if layer_idx + 1 == self._weights.spec.num_layers:
            self._remix(self._weights.join, self._readers(layer_idx + 1, ahead))

    def _attended(self, layer_idx: int) -> Tensor:
        """Return the input of the output projection: attention's output, or of what is in its place."""
        layer, spec = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx]
        heads = self.heads(layer_idx)
        attended = heads.attended.flatten(1)
        if layer.gates:
            assert heads.gates is not None
            self._ops.gate(attended, heads.gates)
        if layer.recurrent is not None and spec.recurrent is not None:
            of_state, state = self._recurrent[spec.recurrent], self._attention.states[layer_idx]
            assert state is not None
            self._ops.recurrent(layer.recurrent, spec.recurrent, self._rows, state, of_state)
            attended = of_state.out
        if (buffers := self.latents(layer_idx)) is not None and layer.latent is not None and spec.latent is not None:
            self._ops.latent_values(layer.latent, spec.latent, buffers)
            attended = buffers.values
        if (of_rows := self.compressed(layer_idx)) is not None and layer.compressed is not None:
            self._ops.grouped(of_rows.attended, layer.compressed.groups, of_rows.grouped)
            attended = of_rows.grouped
        return attended

    def _remix(self, weights: StreamWeights | None, readers: Readers, is_first: bool = False) -> None:
        """Mix several residual streams into the next branch's input, or, after the last layer, into one stream.

        Does nothing for a single stream.
        """
        streams = self._weights.spec.streams
        if streams is not None:
            assert weights is not None and self._streams is not None
            self._ops.remix(weights, streams, is_first, self._streams, self._stream, readers)

    def _mlps(self, layer_idx: int) -> list[Callable[[Readers], None]]:
        """Compute everything that a layer adds after attention. Return the calls that add it to the stream."""
        layer, spec = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx]
        of_input, times = spec.parallel or spec.mlp_only, spec.residual_multiplier * spec.mlp_multiplier
        x = self._normed(layer.input_norm if of_input else layer.pre_mlp_norm, self._stream.scaled)
        adds: list[Callable[[Readers], None]] = []
        has_own_norms = any(experts.has_own_norms for experts in spec.experts)
        if has_own_norms:
            adds.append(self._mlp_and_experts(layer_idx, x))
        elif spec.mlp is not None:
            gated = self._gated[spec.mlp.intermediate_size]
            self._ops.linear(x, layer.gate_up, gated, spec.mlp.activation, spec.mlp.gated)
            assert layer.down is not None
            norm = layer.post_mlp_norm
            adds.append(partial(self._add, gated, layer.down, norm, times, scale=self._scale_after_mlp(layer_idx)))
        together = () if has_own_norms else zip(spec.experts, layer.experts, strict=True)
        for number, (experts, weights) in enumerate(together):
            buffers = self._experts[number, experts]
            self._ops.linear(x, [weights.router], buffers.logits)
            self._ops.choose_experts(weights, experts, self._rows, buffers)
            self._ops.experts(x, weights, experts, buffers)
            add = partial(self._ops.experts_add, weights, experts, buffers, times, self._stream)
            adds.append(add)
        if spec.experts and not has_own_norms and (self._devices is not None or spec.post_norm):
            adds = [partial(self._add_together, layer_idx)]
        if layer.layer_input is not None:
            adds.append(partial(self._add_input, layer_idx, layer.layer_input))
        return adds

    def _add_together(self, layer_idx: int, readers: Readers) -> None:
        """Add the layer's MLP and experts as one output: normed, and summed over devices in one all-reduce."""
        layer, spec, branch = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx], self._branch
        assert branch is not None
        if spec.mlp is not None:
            assert layer.down is not None
            self._ops.linear(Normed(self._gated[spec.mlp.intermediate_size]), [layer.down], branch)
        for number, (experts, weights) in enumerate(zip(spec.experts, layer.experts, strict=True)):
            is_first = spec.mlp is None and number == 0
            self._ops.experts_out(weights, experts, self._experts[number, experts], branch, adds=not is_first)
        times, scale = spec.residual_multiplier * spec.mlp_multiplier, self._scale_after_mlp(layer_idx)
        self._add_branch(layer.post_mlp_norm, times, readers, scale)

    def _scale_after_mlp(self, layer_idx: int) -> float:
        """Return the factor of the whole stream after the MLP: 1 if the layer's input, added after it, applies it."""
        layer = self._weights.layers[layer_idx]
        return layer.scale if layer.layer_input is None else 1.0

    def _add_input(self, layer_idx: int, weights: LayerInputWeights, readers: Readers) -> None:
        """Add what the layer computes from its own input of each token, besides the stream: see `InputWeights`."""
        mlp, layer = self._weights.spec.layers[layer_idx].mlp, self._weights.layers[layer_idx]
        assert mlp is not None and self._branch is not None and self._devices is None
        self._ops.linear(Normed(self._stream.hidden), [weights.gate], self._input_gates)
        self._ops.gate(self._inputs[layer_idx], self._input_gates, mlp.activation)
        self._ops.linear(Normed(self._inputs[layer_idx]), [weights.projection], self._branch)
        self._ops.add_normed(self._branch, weights.norm, 1.0, layer.scale, self._stream, readers)

    def _mlp_and_experts(self, layer_idx: int, x: Normed) -> Callable[[Readers], None]:
        """Compute the MLP, and experts that have norms of their own. Return the call that adds both to the stream.

        x: the input of the MLP.
        """
        layer, spec, ops = self._weights.layers[layer_idx], self._weights.spec.layers[layer_idx], self._ops
        (experts,), (weights,), branch = spec.experts, layer.experts, self._branch
        norms, buffers, (expert_in, expert_out) = weights.norms, self._experts[0, experts], self._expert_io
        assert spec.mlp is not None and layer.down is not None and norms is not None and branch is not None
        gated = self._gated[spec.mlp.intermediate_size]
        ops.linear(x, layer.gate_up, gated, spec.mlp.activation, spec.mlp.gated)
        ops.linear(Normed(gated), [layer.down], branch)
        ops.norm(self._stream.hidden, norms.router, expert_in)
        ops.linear(Normed(expert_in), [weights.router], buffers.logits)
        ops.choose_experts(weights, experts, self._rows, buffers)
        ops.norm(self._stream.hidden, norms.pre_experts, expert_in)
        ops.experts(Normed(expert_in), weights, experts, buffers)
        ops.experts_out(weights, experts, buffers, expert_out)
        ops.norm(branch, norms.post_mlp, branch)
        ops.norm(expert_out, norms.post_experts, branch, adds=True)
        scale = self._scale_after_mlp(layer_idx)
        return partial(self._add_branch, layer.post_mlp_norm, spec.residual_multiplier, scale=scale)

    def _add(
        self,
        x: Tensor,
        linear: Linear,
        norm: Tensor | None,
        multiplier: float,
        readers: Readers,
        scale: float = 1.0,  # of the whole stream after the addition
    ) -> None:
        """Add multiplier * norm(linear(x)), the output of a branch, to the stream."""
        sums_tiles = self._stream.tile_sums is not None and linear.quantized is None
        if norm is None and (self._devices is None or sums_tiles):
            assert scale == 1.0, "streams are scaled behind norms"
            self._ops.linear_add(x, linear, multiplier, self._stream, readers)
            return
        assert self._branch is not None
        self._ops.linear(Normed(x), [linear], self._branch)
        self._add_branch(norm, multiplier, readers, scale)

    def _add_branch(self, norm: Tensor | None, multiplier: float, readers: Readers, scale: float) -> None:
        """Add the branch's output, summed over all devices, to the stream."""
        added = self._branch
        assert added is not None
        if self._devices is not None and self._stream.row_sums is None:
            self._devices.add(added)
        self._ops.add_normed(added, norm, multiplier, scale, self._stream, readers)

    def _finish(self) -> None:
        weights, spec = self._weights, self._weights.spec
        part = self.logits if self._logits_part is None else self._logits_part
        self._ops.linear(self._normed(weights.final_norm, self._stream.scaled), [weights.head], part)
        if self._devices is not None and self._logits_part is not None:
            self._devices.gather(self._logits_part, self.logits)
            self._ops.break_chain()
        if spec.logit_multiplier != 1.0 or spec.logit_cap is not None:
            self._ops.finish_logits(self.logits, spec.logit_multiplier, spec.logit_cap)
        self._ops.argmax(self.logits, self.next_ids)

    def _normed(self, norm: Tensor | None, x: Tensor) -> Normed:
        """Return norm(stream) as an operand. x: what the stream's writer prepared for this norm, from `Readers`."""
        return Normed(x) if norm is None else Normed(x, self._stream.squares)

    def _readers(self, layer_idx: int, ahead: bool) -> Readers:
        """Return the norms that read a layer's input: the layer's, and that of the next layer if it is predicted."""
        layers = self._weights.layers
        if layer_idx == len(layers):
            return Readers(self._weights.final_norm)
        ahead = ahead and self._weights.spec.is_predicted(layer_idx + 1)
        norms = [layer.input_norm for layer in layers[layer_idx : layer_idx + 2]]
        return Readers(norms[0], norms[1] if ahead else None)

    def _rotation_in(self, layer_idx: int) -> Rotation | None:
        rope = self._weights.spec.layers[layer_idx].attention.rope
        return None if rope is None else self.rotations[rope]

    def _q_ahead(self, layer_idx: int) -> Tensor:
        """Return the buffer for the predicted query of an indexed layer."""
        return self.q_ahead[self._weights.spec.indexed_layers.index(layer_idx) % 2]


def _head_buffers(spec: HeadsSpec, is_gated: bool, lends: bool, zeros: Callable[..., Tensor]) -> HeadBuffers:
    """lends: whether some layers attend to the rows of others."""
    heads = spec.num_q_heads, spec.head_dim
    gates, q_only = (zeros(spec.q_width) if there else None for there in (is_gated, lends))
    return HeadBuffers(zeros(spec.qkv_width), zeros(*heads), zeros(*heads), gates, q_only)


def expert_buffers(spec: ExpertsSpec, hidden_size: int, zeros: Callable[..., Tensor]) -> ExpertBuffers:
    each = spec.num_chosen
    return ExpertBuffers(
        zeros(spec.num_experts, dtype=torch.float32),
        zeros(each, dtype=torch.int32),
        zeros(each, dtype=torch.float32),
        zeros(each, spec.intermediate_size),
        zeros(each, hidden_size),
    )


def _streams_buffers(spec: StreamsSpec, hidden_size: int, zeros: Callable[..., Tensor]) -> StreamsBuffers:
    sizes = (spec.num,), (spec.num, spec.num), (spec.num_mixes,)
    post, comb, products = (zeros(*x, dtype=torch.float32) for x in sizes)
    return StreamsBuffers(zeros(spec.num, hidden_size), post, comb, products)


def _compressed_buffers(spec: CompressedSpec, zeros: Callable[..., Tensor]) -> CompressedBuffers:
    latents, grouped = zeros(spec.q_rank), zeros(spec.out_width)
    groups = latents.new_zeros(spec.num_groups, len(latents), spec.q_width // spec.num_groups)
    projected, inputs = zeros(spec.q_width + spec.index_q_width), zeros(sum(spec.in_widths))
    return CompressedBuffers(latents, torch.zeros_like(latents), projected, inputs, groups, grouped)


def _latent_buffers(spec: LatentSpec, zeros: Callable[..., Tensor]) -> LatentBuffers:
    inputs, indexer = zeros(sum(spec.in_widths)), spec.indexer
    index_q = zeros(indexer.num_heads, indexer.head_dim) if indexer is not None else None
    index_weights = zeros(indexer.num_heads, dtype=torch.float32) if indexer is not None else None
    return LatentBuffers(
        inputs,
        zeros(spec.q_rank or 0),
        inputs if spec.q_rank is None else zeros(spec.q_width + spec.index_q_width),
        Queries(zeros(spec.num_heads, spec.key_width), index_q, index_weights),
        zeros(spec.num_heads, spec.kv_rank),
        zeros(spec.v_width),
    )


def _first(linears: Sequence[Linear], width: int) -> list[Linear]:
    """Return the linear layers that have the first `width` outputs, the last of them cut to fit."""
    firsts: list[Linear] = []
    for linear in linears:
        if width > 0:
            firsts.append(linear if len(linear.weight) <= width else linear.outputs(0, width))
        width -= len(linear.weight)
    return firsts
