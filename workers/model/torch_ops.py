"""The operations of a decode step in torch: their definition, and what `ModelRunner` runs without a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from csattn.batch import StepRows
from csattn.models.latent import latent_queries, latent_rows, latent_values, query_latents
from csattn.models.latent_spec import LatentSpec
from csattn.models.query import Rotation
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.spec import Activation, ExpertsSpec, StreamsSpec, Temper
from csattn.models.streams import joined_streams, mixed_streams, mixture_of
from csattn.models.weights import (
    ExpertWeights,
    Frequencies,
    HeadNorms,
    InputWeights,
    LatentWeights,
    Linear,
    MemoryWeights,
    RecurrentWeights,
    StreamWeights,
)
from workers.model.ops import (
    LEAST_SUM,
    SQUARES_BLOCK,
    ExpertBuffers,
    LatentBuffers,
    Normed,
    Readers,
    RecurrentBuffers,
    RecurrentState,
    Stream,
    StreamsBuffers,
)

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def activated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Return the input of a gated MLP's last matrix: activation(gate) * up, clamped first for some activations."""
    if activation == "clamped":
        return ACTIVATIONS["quick_gelu"](gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    if activation == "limited":
        return ACTIVATIONS["silu"](gate.clamp(max=10)) * up.clamp(-10, 10)
    return ACTIVATIONS[activation](gate) * up


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "softmax_of_chosen": lambda logits: logits,
    "root_softplus": lambda logits: functional.softplus(logits).sqrt(),
}


class TorchOps:
    """The operations of a step. Here, on a CPU, the work is done when the call returns.

    `TritonOps` enqueues the same operations on a GPU, `TapeOps` records them on tapes.
    """

    def __init__(self, eps: float) -> None:
        """eps: of all norms of the model."""
        self._eps = eps

    def break_chain(self) -> None:
        """Declare that the next operation is the first of a graph, or follows work on other streams.

        On a GPU its kernel then does not start early (programmatic dependent launch).
        """

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,  # [vocab_size, hidden_size]
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """Start the stream with the tokens' embeddings times `multiplier`."""
        stream.hidden.copy_(embedding[rows.token_ids].float() * multiplier)
        _prepare(stream, readers)

    def compute_rotation(
        self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation
    ) -> None:
        """Write the rotation (RoPE) of the rows' positions."""
        angles = rows.positions.float()[:, None] * frequencies.angles
        torch.mul(angles.cos(), frequencies.scale, out=rotation.cos)
        torch.mul(angles.sin(), frequencies.scale, out=rotation.sin)
        if temper is not None:
            rotation.q_scale.copy_(temper.scales(rows.positions))

    def linear(
        self,
        x: Normed,
        linears: Sequence[Linear],  # as in `LayerWeights`
        out: Tensor,  # [batch_size, outputs of all], or half as many if gated, of any float type
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        """out = activation(linears(x)), side by side, or activation(gates(x)) * ups(x)"""
        products = _products(x, linears, self._eps)
        if gated and activation is not None:
            products = activated(activation, *products.chunk(2, dim=-1))
        elif activation is not None:
            products = ACTIVATIONS[activation](products)
        out.copy_(products)

    def choose_experts(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        rows: StepRows,
        buffers: ExpertBuffers,  # `logits` are read; `chosen` and `shares` are written
    ) -> None:
        """Choose each row's experts and compute their shares: MoE routing.

        The best expert comes first, the lower id among equals. With `weights.by_token`, a row has its token's experts.
        """
        scores, scales = SCORES[spec.scores](buffers.logits), weights.scales
        if weights.by_token is None:
            ids = _best_experts(scores if weights.choice_bias is None else scores + weights.choice_bias, spec)
        else:
            ids = weights.by_token[rows.token_ids].long()
        of_chosen = scores.gather(1, ids)
        if spec.scores == "softmax_of_chosen":
            of_chosen = of_chosen.softmax(-1)
        if spec.normed:
            of_chosen = of_chosen / (of_chosen.sum(-1, keepdim=True) + LEAST_SUM)
        buffers.chosen.copy_(ids)
        buffers.shares.copy_(of_chosen * spec.scale if scales is None else of_chosen * spec.scale * scales[ids])

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers) -> None:
        """gated = activation(gates(x)) * ups(x) for each chosen expert, with share * x for x if `spec.on_input`

        Without ups, gated = activation(gates(x)).
        """
        ids, scale = buffers.chosen.long(), _scale(x, self._eps)
        by_share = buffers.shares if spec.on_input else torch.ones_like(buffers.shares)
        weights = weights.plain(x.x.dtype)

        def product(matrices: Tensor, bias: Tensor | None) -> Tensor:
            products = torch.einsum("bh,bkih->bki", x.x.float(), matrices[ids].float())
            products = products * (scale if isinstance(scale, float) else scale[..., None]) * by_share[..., None]
            return products if bias is None else products + bias[ids].float()

        gate = product(weights.gates, weights.gate_bias)
        up = torch.ones_like(gate) if weights.ups is None else product(weights.ups, weights.up_bias)
        buffers.gated.copy_(activated(spec.activation, gate, up))

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        buffers: ExpertBuffers,  # `parts` is scratch memory
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden += multiplier * the sum over chosen experts of share * down(gated), or of down(gated) if
        `spec.on_input`"""
        self._write_parts(weights, spec, buffers)
        stream.hidden.copy_(stream.hidden.float() + multiplier * buffers.parts.float().sum(1))
        _prepare(stream, readers)

    def experts_out(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        buffers: ExpertBuffers,  # `parts` is scratch memory
        out: Tensor,  # [batch_size, hidden_size], of any float type
        adds: bool = False,
    ) -> None:
        """out = what `experts_add` would add with a multiplier of 1; with `adds`, out += that"""
        self._write_parts(weights, spec, buffers)
        total = buffers.parts.float().sum(1)
        out.copy_(out.float() + total if adds else total)

    def _write_parts(self, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers) -> None:
        ids, down = buffers.chosen.long(), weights.plain(buffers.gated.dtype).down
        products = torch.einsum("bki,bkhi->bkh", buffers.gated.float(), down[ids].float())
        if weights.down_bias is not None:
            products = products + weights.down_bias[ids].float()
        buffers.parts.copy_(products if spec.on_input else products * buffers.shares[..., None])

    def norm(self, x: Tensor, norm: Tensor, out: Tensor, adds: bool = False) -> None:
        """out = norm(x), both [batch_size, width], norm [width] float32; with `adds`, out += that"""
        normed = _norm(x.float(), norm, self._eps)
        out.copy_(out.float() + normed if adds else normed)

    def grouped(
        self,
        x: Tensor,  # [num_groups, batch_size, num_in]
        linear: Linear,  # [num_groups * num_out, num_in]
        out: Tensor,  # [batch_size, num_groups * num_out]
    ) -> None:
        """out = the products of each group's x with its own rows of the matrix, side by side"""
        num_out = out.shape[1] // len(x)
        for group, of_group in enumerate(x):
            part = slice(group * num_out, (group + 1) * num_out)
            out[:, part] = _products(Normed(of_group), [linear.outputs(part.start, part.stop)], self._eps)

    def linear_add(
        self,
        x: Tensor,  # [batch_size, num_in]
        linear: Linear,
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden += multiplier * linear(x)"""
        stream.hidden.copy_(stream.hidden.float() + multiplier * _products(Normed(x), [linear], self._eps))
        _prepare(stream, readers)

    def add_normed(
        self,
        x: Tensor,  # [batch_size, hidden_size], of any float type
        norm: Tensor | None,  # [hidden_size] float32; None: x itself, which several devices have summed
        multiplier: float,
        scale: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden = scale * (hidden + multiplier * norm(x))"""
        added = x.float() if norm is None else _norm(x.float(), norm, self._eps)
        stream.hidden.copy_(scale * (stream.hidden.float() + multiplier * added))
        _prepare(stream, readers)

    def remix(
        self,
        weights: StreamWeights,
        spec: StreamsSpec,
        is_first: bool,  # the first of a step: the streams are not set yet, and `stream` is the token's embedding
        buffers: StreamsBuffers,  # all of it is written
        stream: Stream,  # all of it is written
        readers: Readers,  # its `ahead` is None
    ) -> None:
        """Mix the streams and add the last branch's output to them; then prepare the next branch's input from a
        mixture of the streams.

        hidden becomes 0, to which the next branch adds; or, if the weights join the streams, the mixture.
        """
        branch_out = stream.hidden.float()
        if is_first:
            buffers.streams.copy_(branch_out[:, None])
        else:
            buffers.streams.copy_(mixed_streams(buffers.streams.float(), branch_out, buffers.post, buffers.comb))
        streams = buffers.streams.float()
        mixture = mixture_of(streams, weights, spec, self._eps)
        stream.hidden.copy_(joined_streams(streams, mixture.pre))
        _prepare(stream, readers)
        if not weights.joins:
            buffers.post.copy_(mixture.post)
            buffers.comb.copy_(mixture.comb)
            stream.hidden.zero_()

    def rotate_append(
        self,
        qkv: Tensor,  # [batch_size, (num_q_heads + 2 * num_kv_heads) * head_dim]; only queries if there is no tail
        norms: HeadNorms | None,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor | None,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]: one layer's
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = q_scale * rope(q of qkv); rows that are not idle append their K, after RoPE, and V to their tail.

        Heads that have norms are normed first; see `HeadNorms.after_rope`.
        """
        num_q_heads, head_dim = q.shape[1:]
        heads = qkv.view(rows.batch_size, -1, head_dim).float()
        own_q, kv_heads = heads[:, :num_q_heads], heads[:, num_q_heads:]
        own_q = own_q if norms is None else _head_norm(own_q, norms.q, self._eps, norms.after_rope)
        q_weight, k_weight = _weights_after_rope(norms)
        q.copy_(_rotated_q(own_q, rotation) * q_weight)
        if tail is None:
            return
        k, v = kv_heads.chunk(2, dim=1)
        if norms is not None:
            k = _head_norm(k, norms.k, self._eps, norms.after_rope)
            v = v if norms.v is None else _head_norm(v, norms.v, self._eps)
        kv = torch.stack([(k if rotation is None else rotation(k)) * k_weight, v], dim=2).to(tail.dtype)
        active = rows.tail_lens > 0
        tail[rows.tail_ids[active].long(), :, (rows.tail_lens - rows.tail_starts)[active].long() - 1] = kv[active]

    def copy_rows(self, source: Tensor, tail: Tensor, rows: StepRows) -> None:
        """Copy the K and V that rows that are not idle have appended to one layer's tails to another layer's.

        source, tail: [num_tails, num_kv_heads, tail_capacity, 2, head_dim]; tail is written.
        """
        active = rows.tail_lens > 0
        at = rows.tail_ids[active].long(), slice(None), (rows.tail_lens - rows.tail_starts)[active].long() - 1
        tail[at] = source[at]

    def make_inputs(
        self,
        projected: Tensor,  # [batch_size, num_layers * layer_input_width]: the embedding's projection
        weights: InputWeights,
        rows: StepRows,
        out: Tensor,  # [num_layers, batch_size, layer_input_width], written
    ) -> None:
        """Compute each layer's own inputs of the rows' tokens: see `InputWeights`."""
        by_layer = projected.float().view(len(projected), len(out), -1)
        made = _norm(by_layer * weights.scale, weights.norm, self._eps)
        own = weights.table[rows.token_ids].float().view(made.shape) * weights.table_scale
        out.copy_(((made + own) * 2**-0.5).transpose(0, 1))

    def gate(self, x: Tensor, gates: Tensor, activation: Activation | None = None) -> None:
        """x *= activation(gates), both [batch_size, width]; None: sigmoid"""
        function = torch.sigmoid if activation is None else ACTIVATIONS[activation]
        x.copy_(x.float() * function(gates.float()))

    def recurrent(
        self,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        rows: StepRows,
        state: RecurrentState,  # written for the tails of rows that are not idle
        buffers: RecurrentBuffers,  # `inputs` are read, `mixed` is scratch memory, `out` is written
    ) -> None:
        """Each row updates its request's state and reads it. The rows of a request must come in their tokens' order.

        A causal convolution mixes each channel's last inputs; what follows is up to the layer's kind.
        """
        versions, new_states = state.conv.shape[1], dict[int, tuple[Tensor, Tensor]]()
        for row in (rows.tail_lens > 0).nonzero()[:, 0].tolist():
            tail = int(rows.tail_ids[row])
            version = int(state.version[tail])
            conv, memory = new_states.get(tail) or (state.conv[tail, version], state.memory[tail, version])
            channels, more = buffers.inputs[row].float().tensor_split([spec.num_channels])
            if isinstance(spec, ConvSpec):
                before, after = more.chunk(2)
                channels = channels * before
            seen = torch.cat([conv, channels[:, None]], dim=1)
            mixed = (seen * weights.conv).sum(1) + (0.0 if weights.conv_bias is None else weights.conv_bias)
            if isinstance(spec, ConvSpec):
                buffers.out[row] = mixed * after
            else:
                buffers.mixed[row] = functional.silu(mixed)
                compute: Any = _delta if isinstance(spec, DeltaSpec) else _scan
                out, memory = compute(buffers.mixed[row].float(), more, memory, weights.memory, spec, self._eps)
                buffers.out[row] = out.flatten()
            new_states[tail] = seen[:, 1:], memory
        for tail, (conv, memory) in new_states.items():
            version = (int(state.version[tail]) + 1) % versions
            state.conv[tail, version], state.memory[tail, version] = conv, memory

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,  # [num_tails, 1, tail_capacity, 2, head_dim]: one layer's
        buffers: LatentBuffers,  # `inputs` are read, `q_latents` written
    ) -> None:
        """Norm the queries' latents, if there are any. Rows that are not idle append their latents to their tail."""
        if spec.q_rank is not None:
            buffers.q_latents.copy_(query_latents(buffers.inputs, weights, spec))
        own = latent_rows(buffers.inputs, weights, spec, rotation, tail.shape[3:].numel())
        active = rows.tail_lens > 0
        at = rows.tail_ids[active].long(), 0, rows.tail_lens[active].long() - 1
        tail[at] = own.view(-1, *tail.shape[3:])[active].to(tail.dtype)

    def project_latent_queries(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        buffers: LatentBuffers,  # `inputs` and `projected` are read, `queries` written
    ) -> None:
        """Compute the queries of latents and of the indexer: see `csattn.models.latent.latent_queries`."""
        queries = latent_queries(buffers.inputs, buffers.projected, weights, spec, rotation)
        places = buffers.queries
        places.q.copy_(queries.q)
        for place, part in ((places.index_q, queries.index_q), (places.index_weights, queries.index_weights)):
            if place is not None and part is not None:
                place.copy_(part)

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, buffers: LatentBuffers) -> None:
        """values = each head's attended latent, projected up to its values"""
        buffers.values.copy_(latent_values(buffers.attended, weights))

    def predict_query(
        self,
        early: Tensor,  # [batch_size, num_q_heads * head_dim]: the next layer's query projection of this layer's input
        norms: HeadNorms | None,  # of the next layer
        # [num_contexts, num_q_heads, head_dim + 1, head_dim]; on a tape [batch_size] addresses of one context's maps
        maps: Any,
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = q_scale * rope([norm(early), 1] @ maps[row's context]); for idle rows any finite number."""
        heads = early.view(q.shape).float()
        if norms is not None:
            heads = _head_norm(heads, norms.q, self._eps, norms.after_rope).to(q.dtype).float()
        chosen = maps[rows.context_ids.clamp(min=0).long()].float()
        mapped = torch.einsum("bhd,bhde->bhe", heads, chosen[:, :, :-1]) + chosen[:, :, -1]
        q.copy_(_rotated_q(mapped, rotation) * _weights_after_rope(norms)[0])

    def finish_logits(
        self,
        logits: Tensor,  # [batch_size, vocab_size] float32, written
        multiplier: float,
        cap: float | None,
    ) -> None:
        """logits *= multiplier, then logits = cap * tanh(logits / cap) if there is a cap"""
        logits.mul_(multiplier)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)

    def argmax(
        self,
        logits: Tensor,  # [batch_size, vocab_size] float32
        next_ids: Tensor,  # [batch_size] int64
    ) -> None:
        """next_ids = the argmax of each row's logits, the first of equals; -1 if the largest is NaN or infinity"""
        largest, token_ids = logits.max(dim=-1)  # NaN counts as the largest
        next_ids.copy_(torch.where(largest < torch.inf, token_ids, -1))


def _best_experts(ranked: Tensor, spec: ExpertsSpec) -> Tensor:
    """Return the ids [batch_size, num_chosen] of the experts with the best scores, bias included, within the best
    groups. ranked: [batch_size, num_experts]."""
    num_groups, num_kept = spec.groups
    if num_groups > 1:
        by_group = ranked.view(len(ranked), num_groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(-1).sort(descending=True, stable=True).indices[:, :num_kept]
        kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranked.device).scatter(1, best, True)
        ranked = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return ranked.sort(descending=True, stable=True).indices[:, : spec.num_chosen]


def _prepare(stream: Stream, readers: Readers) -> None:
    hidden = stream.hidden.float()
    if stream.centred:
        hidden -= hidden.mean(-1, keepdim=True)
        stream.hidden.copy_(hidden)
    stream.scaled.copy_(hidden if readers.norm is None else hidden * readers.norm)
    if readers.ahead is not None:
        stream.scaled_ahead.copy_(hidden * readers.ahead)
    padded = functional.pad(hidden.square(), (0, -hidden.shape[1] % SQUARES_BLOCK))
    stream.squares.copy_(padded.view(len(hidden), -1, SQUARES_BLOCK).sum(-1).T)


def _products(x: Normed, linears: Sequence[Linear], eps: float) -> Tensor:
    """Return the products of x with all linear layers side by side, float32."""
    scale = _scale(x, eps)
    products = [functional.linear(x.x, linear.plain(x.x.dtype)).float() * scale for linear in linears]
    biased = [
        product if linear.bias is None else product + linear.bias.float()
        for product, linear in zip(products, linears, strict=True)
    ]
    return torch.cat(biased, dim=-1)


def _delta(
    mixed: Tensor, more: Tensor, memory: Tensor, weights: MemoryWeights, spec: DeltaSpec, eps: float
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet: return a token's output [num_v_heads, v_dim] and the memory after it.

    mixed: [num_channels], queries, keys and values; more: the inputs after the channels; all float32.
    """
    z, write, forget = torch.split(more, [spec.out_width, spec.num_v_heads, spec.num_v_heads])
    q, k, v = torch.split(mixed, [*2 * [spec.num_k_heads * spec.k_dim], spec.out_width])
    q, k = (_unit(x.view(-1, spec.k_dim)).repeat_interleave(spec.num_v_heads // spec.num_k_heads, 0) for x in (q, k))
    decay_factor = torch.exp(-weights.decay * functional.softplus(forget + weights.step_bias))
    memory = memory * decay_factor[:, None, None]
    change = (v.view(-1, spec.v_dim) - torch.einsum("hkv,hk->hv", memory, k)) * write.sigmoid()[:, None]
    memory = memory + k[:, :, None] * change[:, None]
    read = torch.einsum("hkv,hk->hv", memory, q) * spec.k_dim**-0.5
    return _norm(read, weights.norm, eps) * functional.silu(z.view(read.shape)), memory


def _scan(
    mixed: Tensor, more: Tensor, memory: Tensor, weights: MemoryWeights, spec: ScanSpec, eps: float
) -> tuple[Tensor, Tensor]:
    """Mamba-2: return a token's output [num_groups, out_width / num_groups] and the memory after it.

    mixed: [num_channels], values, where each group writes, and where it reads; more: as for `_delta`.
    """
    z, step = torch.split(more, [spec.out_width, spec.num_heads])
    values, write, read = torch.split(mixed, [spec.out_width, *2 * [spec.num_groups * spec.state_dim]])
    each, values = spec.num_heads // spec.num_groups, values.view(-1, spec.head_dim)
    write, read = (x.view(-1, spec.state_dim).repeat_interleave(each, 0) for x in (write, read))
    step = functional.softplus(step + weights.step_bias).clamp(min=spec.least_step)
    memory = memory * torch.exp(-weights.decay * step)[:, None, None]
    memory = memory + write[:, :, None] * (step[:, None] * values)[:, None]
    assert weights.skip is not None
    out = torch.einsum("hnp,hn->hp", memory, read) + weights.skip[:, None] * values
    gated = (out.flatten() * functional.silu(z)).view(spec.num_groups, -1)
    return _norm(gated, weights.norm.view(gated.shape), eps), memory


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scale(x: Normed, eps: float) -> Tensor | float:
    """Return the factor of a product of x: the inverse root mean square of the stream, or 1."""
    return 1.0 if x.squares is None else torch.rsqrt(x.squares.sum(0) / x.x.shape[1] + eps)[:, None]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _head_norm(heads: Tensor, weight: Tensor, eps: float, after_rope: bool = False) -> Tensor:
    """RMSNorm of each head, or of all heads together if the weight is as wide as all of them.

    heads: [batch_size, num_heads, head_dim]. after_rope: the weight multiplies later.
    """
    if after_rope:
        weight = torch.ones_like(weight)
    together = heads.flatten(1) if len(weight) > heads.shape[2] else heads
    return _norm(together, weight, eps).view(heads.shape)


def _weights_after_rope(norms: HeadNorms | None) -> tuple[Tensor | float, Tensor | float]:
    """Return what multiplies q and k after RoPE."""
    return (norms.q, norms.k) if norms is not None and norms.after_rope else (1.0, 1.0)


def _rotated_q(heads: Tensor, rotation: Rotation | None) -> Tensor:
    return heads if rotation is None else rotation(heads) * rotation.q_scale[:, None, None]
