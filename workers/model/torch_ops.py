"""`StepOps` in torch: their definition, and what runs where there is no GPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from csattn.batch import StepRows
from csattn.models.latent import Turn, latent_queries, latent_rows, latent_values, query_latents
from csattn.models.spec import Activation, DeltaSpec, ExpertsSpec, LatentSpec, Temper
from csattn.models.weights import (
    DeltaWeights,
    ExpertWeights,
    Frequencies,
    HeadNorms,
    InputWeights,
    LatentWeights,
    Linear,
)
from workers.model.ops import (
    SQUARES_BLOCK,
    DeltaRoom,
    DeltaState,
    ExpertRoom,
    LatentRoom,
    Normed,
    Readers,
    Rotation,
    Stream,
)

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def activated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """What a gated MLP multiplies with its last matrix."""
    if activation != "clamped":
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class TorchOps:
    """`StepOps` as torch says them."""

    def break_chain(self) -> None:
        pass

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        stream.hidden.copy_(embedding[rows.token_ids].float() * multiplier)
        _prepare(stream, readers)

    def turn(self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation) -> None:
        angles = rows.positions.float()[:, None] * frequencies.angles
        torch.mul(angles.cos(), frequencies.scale, out=rotation.cos)
        torch.mul(angles.sin(), frequencies.scale, out=rotation.sin)
        if temper is not None:
            rotation.q_scale.copy_(temper.scales(rows.positions))

    def linear(self, x: Normed, linears: Sequence[Linear], out: Tensor) -> None:
        out.copy_(_products(x, linears))

    def mlp(self, x: Normed, gate_up: Sequence[Linear], gated: bool, activation: Activation, out: Tensor) -> None:
        products = _products(x, gate_up)
        if gated:
            gate, up = products.chunk(2, dim=-1)
            out.copy_(activated(activation, gate, up))
        else:
            out.copy_(ACTIVATIONS[activation](products))

    def choose_experts(self, bias: Tensor | None, scales: Tensor | None, spec: ExpertsSpec, room: ExpertRoom) -> None:
        logits = room.logits
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(spec.scores, logits)
        ranked = scores if bias is None else scores + bias
        num_groups, num_kept = spec.groups
        if num_groups > 1:
            by_group = ranked.view(len(ranked), num_groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).sort(descending=True, stable=True).indices[:, :num_kept]
            kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranked.device).scatter(1, best, True)
            ranked = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        ids = ranked.sort(descending=True, stable=True).indices[:, : spec.num_chosen]
        of_chosen = scores.gather(1, ids)
        if spec.scores == "softmax_of_chosen":
            of_chosen = of_chosen.softmax(-1)
        if spec.normed:
            of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
        room.chosen.copy_(ids)
        room.shares.copy_(of_chosen * spec.scale if scales is None else of_chosen * spec.scale * scales[ids])

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom) -> None:
        ids, scale = room.chosen.long(), _scale(x)
        by_share = room.shares if spec.on_input else torch.ones_like(room.shares)
        weights = weights.plain(x.x.dtype)

        def product(matrices: Tensor, bias: Tensor | None) -> Tensor:
            products = torch.einsum("bh,bkih->bki", x.x.float(), matrices[ids].float())
            products = products * (scale if isinstance(scale, float) else scale[..., None]) * by_share[..., None]
            return products if bias is None else products + bias[ids].float()

        gate, up = product(weights.gates, weights.gate_bias), product(weights.ups, weights.up_bias)
        room.gated.copy_(activated(spec.activation, gate, up))

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        self._write_parts(weights, spec, room)
        stream.hidden.copy_(stream.hidden.float() + multiplier * room.parts.float().sum(1))
        _prepare(stream, readers)

    def experts_out(self, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom, out: Tensor) -> None:
        self._write_parts(weights, spec, room)
        out.copy_(room.parts.float().sum(1))

    def _write_parts(self, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom) -> None:
        ids, down = room.chosen.long(), weights.plain(room.gated.dtype).down
        products = torch.einsum("bki,bkhi->bkh", room.gated.float(), down[ids].float())
        if weights.down_bias is not None:
            products = products + weights.down_bias[ids].float()
        room.parts.copy_(products if spec.on_input else products * room.shares[..., None])

    def read_normed(self, stream: Stream, norm: Tensor, eps: float, out: Tensor) -> Normed:
        out.copy_(stream.hidden.float() * norm)
        return Normed(out, stream.squares, eps)

    def add_norms(self, x: Tensor, norm: Tensor, other: Tensor, other_norm: Tensor, eps: float) -> None:
        x.copy_(_norm(x.float(), norm, eps) + _norm(other.float(), other_norm, eps))

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        stream.hidden.copy_(stream.hidden.float() + multiplier * _products(Normed(x), [linear]))
        _prepare(stream, readers)

    def add_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        multiplier: float,
        scale: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        added = x.float() if norm is None else _norm(x.float(), norm, eps)
        stream.hidden.copy_(scale * (stream.hidden.float() + multiplier * added))
        _prepare(stream, readers)

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor | None,
        q: Tensor,
    ) -> None:
        num_q_heads, head_dim = q.shape[1:]
        heads = qkv.view(rows.batch_size, -1, head_dim).float()
        own_q, kv_heads = heads[:, :num_q_heads], heads[:, num_q_heads:]
        own_q = own_q if norms is None else _head_norm(own_q, norms.q, eps)
        q.copy_(_rotated_q(own_q, rotation))
        if tail is None:
            return
        k, v = kv_heads.chunk(2, dim=1)
        if norms is not None:
            k = _head_norm(k, norms.k, eps)
            v = v if norms.v is None else _head_norm(v, norms.v, eps)
        kv = torch.stack([_rotated(k, rotation), v], dim=2).to(tail.dtype)
        active = rows.tail_lens > 0
        tail[rows.tail_ids[active].long(), :, (rows.tail_lens - rows.tail_starts)[active].long() - 1] = kv[active]

    def copy_rows(self, source: Tensor, tail: Tensor, rows: StepRows) -> None:
        active = rows.tail_lens > 0
        at = rows.tail_ids[active].long(), slice(None), (rows.tail_lens - rows.tail_starts)[active].long() - 1
        tail[at] = source[at]

    def make_inputs(self, projected: Tensor, weights: InputWeights, eps: float, rows: StepRows, out: Tensor) -> None:
        by_layer = projected.float().view(len(projected), len(out), -1)
        made = _norm(by_layer * weights.scale, weights.norm, eps)
        own = weights.table[rows.token_ids].float().view(made.shape) * weights.table_scale
        out.copy_(((made + own) * 2**-0.5).transpose(0, 1))

    def take_input(self, gates: Tensor, activation: Activation, given: Tensor) -> None:
        gates.copy_(ACTIVATIONS[activation](gates.float()) * given.float())

    def gate(self, x: Tensor, gates: Tensor) -> None:
        x.copy_(x.float() * torch.sigmoid(gates.float()))

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        room: DeltaRoom,
    ) -> None:
        versions, kept = state.conv.shape[1], dict[int, tuple[Tensor, Tensor]]()
        for row in (rows.tail_lens > 0).nonzero()[:, 0].tolist():
            tail = int(rows.tail_ids[row])
            version = int(state.turn[tail])
            conv, memory = kept.get(tail) or (state.conv[tail, version], state.memory[tail, version])
            widths = [spec.num_channels, spec.v_width, spec.num_v_heads, spec.num_v_heads]
            channels, z, write, forget = torch.split(room.inputs[row].float(), widths)
            seen = torch.cat([conv, channels[:, None]], dim=1)
            room.mixed[row] = functional.silu((seen * weights.conv).sum(1))
            q, k, v = torch.split(room.mixed[row].float(), [*2 * [spec.num_k_heads * spec.k_dim], spec.v_width])
            q, k = (
                _unit(x.view(-1, spec.k_dim)).repeat_interleave(spec.num_v_heads // spec.num_k_heads, 0) for x in (q, k)
            )
            kept_share = torch.exp(-weights.decay * functional.softplus(forget + weights.decay_bias))
            memory = memory * kept_share[:, None, None]
            change = (v.view(-1, spec.v_dim) - torch.einsum("hkv,hk->hv", memory, k)) * write.sigmoid()[:, None]
            memory = memory + k[:, :, None] * change[:, None]
            read = torch.einsum("hkv,hk->hv", memory, q) * spec.k_dim**-0.5
            room.out[row] = (_norm(read, weights.norm, eps) * functional.silu(z.view(read.shape))).flatten()
            kept[tail] = seen[:, 1:], memory
        for tail, (conv, memory) in kept.items():
            version = (int(state.turn[tail]) + 1) % versions
            state.conv[tail, version], state.memory[tail, version] = conv, memory

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,
        room: LatentRoom,
    ) -> None:
        if spec.q_rank is not None:
            room.q_latents.copy_(query_latents(room.inputs, weights, spec))
        own = latent_rows(room.inputs, weights, spec, _turn(rotation), tail.shape[3:].numel())
        active = rows.tail_lens > 0
        at = rows.tail_ids[active].long(), 0, rows.tail_lens[active].long() - 1
        tail[at] = own.view(-1, *tail.shape[3:])[active].to(tail.dtype)

    def ask_latents(self, weights: LatentWeights, spec: LatentSpec, rotation: Rotation, room: LatentRoom) -> None:
        asked = latent_queries(room.inputs, room.projected, weights, spec, _turn(rotation))
        places = room.queries
        places.q.copy_(asked.q)
        for place, part in ((places.index_q, asked.index_q), (places.index_weights, asked.index_weights)):
            if place is not None and part is not None:
                place.copy_(part)

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, room: LatentRoom) -> None:
        room.values.copy_(latent_values(room.attended, weights))

    def predict_query(
        self,
        early: Tensor,
        norms: HeadNorms | None,
        eps: float,
        maps: Tensor,
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        heads = early.view(q.shape).float()
        if norms is not None:
            heads = _head_norm(heads, norms.q, eps).to(q.dtype).float()
        chosen = maps[rows.context_ids.clamp(min=0).long()].float()
        mapped = torch.einsum("bhd,bhde->bhe", heads, chosen[:, :, :-1]) + chosen[:, :, -1]
        q.copy_(_rotated_q(mapped, rotation))

    def finish_logits(self, logits: Tensor, multiplier: float, cap: float | None) -> None:
        logits.mul_(multiplier)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)

    def likeliest(self, logits: Tensor, next_ids: Tensor) -> None:
        largest, token_ids = logits.max(dim=-1)  # NaN is the greatest
        next_ids.copy_(torch.where(largest < torch.inf, token_ids, -1))

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        active = rows.tail_lens > 0
        rows.token_ids.copy_(next_ids.clamp(min=0))
        rows.positions.add_(active)
        rows.tail_lens.add_(active)


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


def _products(x: Normed, linears: Sequence[Linear]) -> Tensor:
    """float32"""
    scale = _scale(x)
    products = [functional.linear(x.x, linear.plain(x.x.dtype)).float() * scale for linear in linears]
    biased = [
        product if linear.bias is None else product + linear.bias.float()
        for product, linear in zip(products, linears, strict=True)
    ]
    return torch.cat(biased, dim=-1)


def _turn(rotation: Rotation) -> Turn:
    return Turn(rotation.cos, rotation.sin, rotation.interleaved)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scale(x: Normed) -> Tensor | float:
    """What a product of x is multiplied by."""
    return 1.0 if x.squares is None else torch.rsqrt(x.squares.sum(0) / x.x.shape[1] + x.eps)[:, None]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of each of the heads [batch_size, num_heads, head_dim], or, where there are weights for all, of all together."""
    together = heads.flatten(1) if len(weight) > heads.shape[2] else heads
    return _norm(together, weight, eps).view(heads.shape)


def _rotated_q(heads: Tensor, rotation: Rotation | None) -> Tensor:
    return heads if rotation is None else _rotated(heads, rotation) * rotation.q_scale[:, None, None]


def _rotated(heads: Tensor, rotation: Rotation | None) -> Tensor:
    """RoPE of heads [batch_size, num_heads, head_dim], float32."""
    if rotation is None:
        return heads
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    turned, rest = heads[..., : 2 * cos.shape[-1]], heads[..., 2 * cos.shape[-1] :]
    if rotation.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([pairs, rest], dim=-1)
