"""`StepOps` in torch: their definition, and what runs where there is no GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from csattn.batch import StepRows
from workers.model_runner.ops import SQUARES_BLOCK, HeadNorms, Rotation, Stream


class TorchOps:
    """`StepOps` as torch says them."""

    def break_chain(self) -> None:
        pass

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,
        stream: Stream,
        norm: Tensor,
        norm_ahead: Tensor | None,
        inverse_frequencies: Tensor,
        rope_scale: float,
        rotation: Rotation,
    ) -> None:
        stream.hidden.copy_(embedding[rows.token_ids])
        _prepare(stream, norm, norm_ahead)
        angles = rows.positions.float()[:, None] * inverse_frequencies
        torch.mul(angles.cos(), rope_scale, out=rotation.cos)
        torch.mul(angles.sin(), rope_scale, out=rotation.sin)

    def likeliest(self, logits: Tensor, next_ids: Tensor) -> None:
        largest, token_ids = logits.max(dim=-1)  # NaN is the greatest
        next_ids.copy_(torch.where(largest < torch.inf, token_ids, -1))

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        active = rows.context_ids >= 0
        rows.token_ids.copy_(next_ids.clamp(min=0))
        rows.positions.add_(active)
        rows.tail_lens.add_(active)

    def normed_linear(
        self, scaled: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        product = _normed_product(scaled, squares, eps, weight)
        out.copy_(product if bias is None else product + bias.float())

    def normed_gate_up(self, scaled: Tensor, squares: Tensor, eps: float, weight: Tensor, out: Tensor) -> None:
        gate, up = _normed_product(scaled, squares, eps, weight).chunk(2, dim=-1)
        out.copy_(functional.silu(gate) * up)

    def linear_add(self, x: Tensor, weight: Tensor, stream: Stream, norm: Tensor, norm_ahead: Tensor | None) -> None:
        stream.hidden.copy_(stream.hidden.float() + functional.linear(x, weight).float())
        _prepare(stream, norm, norm_ahead)

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation,
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
        q_norm: Tensor | None,
        eps: float,
        maps: Tensor,
        rotation: Rotation,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        heads = early.view(q.shape).float()
        if q_norm is not None:
            heads = _head_norm(heads, q_norm, eps).to(q.dtype).float()
        chosen = maps[rows.context_ids.clamp(min=0).long()].float()
        mapped = torch.einsum("bhd,bhde->bhe", heads, chosen[:, :, :-1]) + chosen[:, :, -1]
        q.copy_(_rotated(mapped, rotation))


def _prepare(stream: Stream, norm: Tensor, norm_ahead: Tensor | None) -> None:
    hidden = stream.hidden.float()
    stream.scaled.copy_(hidden * norm.float())
    if norm_ahead is not None:
        stream.scaled_ahead.copy_(hidden * norm_ahead.float())
    padded = functional.pad(hidden.square(), (0, -hidden.shape[1] % SQUARES_BLOCK))
    stream.squares.copy_(padded.view(len(hidden), -1, SQUARES_BLOCK).sum(-1).T)


def _normed_product(scaled: Tensor, squares: Tensor, eps: float, weight: Tensor) -> Tensor:
    """norm(hidden) @ weight.T, float32."""
    scale = torch.rsqrt(squares.sum(0) / scaled.shape[1] + eps)
    return functional.linear(scaled, weight).float() * scale[:, None]


def _head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """RoPE of heads [batch_size, num_heads, head_dim], float32."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
