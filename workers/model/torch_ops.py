"""`StepOps` in torch: their definition, and what runs where there is no GPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from csattn.batch import StepRows
from csattn.models.spec import Activation
from csattn.models.weights import HeadNorms, Linear
from workers.model.ops import SQUARES_BLOCK, Normed, Readers, Rotation, Stream

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


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
        inverse_frequencies: Tensor,
        rope_scale: float,
        rotation: Rotation,
    ) -> None:
        stream.hidden.copy_(embedding[rows.token_ids].float() * multiplier)
        _prepare(stream, readers)
        angles = rows.positions.float()[:, None] * inverse_frequencies
        torch.mul(angles.cos(), rope_scale, out=rotation.cos)
        torch.mul(angles.sin(), rope_scale, out=rotation.sin)

    def linear(self, x: Normed, linears: Sequence[Linear], out: Tensor) -> None:
        out.copy_(_products(x, linears))

    def mlp(self, x: Normed, gate_up: Sequence[Linear], gated: bool, activation: Activation, out: Tensor) -> None:
        products = _products(x, gate_up)
        if gated:
            gate, up = products.chunk(2, dim=-1)
            out.copy_(ACTIVATIONS[activation](gate) * up)
        else:
            out.copy_(ACTIVATIONS[activation](products))

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        stream.hidden.copy_(stream.hidden.float() + multiplier * _products(Normed(x), [linear]))
        _prepare(stream, readers)

    def add_normed(
        self, x: Tensor, norm: Tensor, eps: float, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        stream.hidden.copy_(stream.hidden.float() + multiplier * _norm(x.float(), norm, eps))
        _prepare(stream, readers)

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor,
        q: Tensor,
    ) -> None:
        num_q_heads, head_dim = q.shape[1:]
        heads = qkv.view(rows.batch_size, -1, head_dim).float()
        own_q, kv_heads = heads[:, :num_q_heads], heads[:, num_q_heads:]
        k, v = kv_heads.chunk(2, dim=1)
        if norms is not None:
            own_q, k = _head_norm(own_q, norms.q, eps), _head_norm(k, norms.k, eps)
        q.copy_(_rotated(own_q, rotation))
        kv = torch.stack([_rotated(k, rotation), v], dim=2).to(tail.dtype)
        active = rows.context_ids >= 0
        tail[rows.tail_ids[active].long(), :, rows.tail_lens[active].long() - 1] = kv[active]

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
        q.copy_(_rotated(mapped, rotation))

    def finish_logits(self, logits: Tensor, multiplier: float, cap: float | None) -> None:
        logits.mul_(multiplier)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)

    def likeliest(self, logits: Tensor, next_ids: Tensor) -> None:
        largest, token_ids = logits.max(dim=-1)  # NaN is the greatest
        next_ids.copy_(torch.where(largest < torch.inf, token_ids, -1))

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        active = rows.context_ids >= 0
        rows.token_ids.copy_(next_ids.clamp(min=0))
        rows.positions.add_(active)
        rows.tail_lens.add_(active)


def _prepare(stream: Stream, readers: Readers) -> None:
    hidden = stream.hidden.float()
    stream.scaled.copy_(hidden if readers.norm is None else hidden * readers.norm)
    if readers.ahead is not None:
        stream.scaled_ahead.copy_(hidden * readers.ahead)
    padded = functional.pad(hidden.square(), (0, -hidden.shape[1] % SQUARES_BLOCK))
    stream.squares.copy_(padded.view(len(hidden), -1, SQUARES_BLOCK).sum(-1).T)


def _products(x: Normed, linears: Sequence[Linear]) -> Tensor:
    """float32"""
    scale = 1.0 if x.squares is None else torch.rsqrt(x.squares.sum(0) / x.x.shape[1] + x.eps)[:, None]
    products = [functional.linear(x.x, linear.weight).float() * scale for linear in linears]
    biased = [
        product if linear.bias is None else product + linear.bias.float()
        for product, linear in zip(products, linears, strict=True)
    ]
    return torch.cat(biased, dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of each of the heads [batch_size, num_heads, head_dim], or, where there are weights for all, of all together."""
    together = heads.flatten(1) if len(weight) > heads.shape[2] else heads
    return _norm(together, weight, eps).view(heads.shape)


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
