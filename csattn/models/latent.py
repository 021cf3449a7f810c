"""Attention in latent space (MLA, arXiv:2405.04434) by definition, in torch: of a decode step, and of a prefill.

What makes keys and values of latents is taken into queries and outputs, so that a row is read as it is kept. Where the
model has a learned indexer (arXiv:2512.02556), only the rows that it chooses are: `csattn.lightning`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from csattn.attention import attend_chunk
from csattn.lightning import Operands, choose_keys, sparse_mla
from csattn.models.query import rotate
from csattn.models.spec import LatentSpec
from csattn.models.weights import LatentWeights

_LISTED = 64  # tokens whose lists are in memory at a time
EPS = 1e-6  # of the norms of latents and index keys, whatever it is of the model's others


@dataclass(frozen=True, slots=True)
class Turn:
    """RoPE of some positions, for latents: it turns `LatentSpec.rope_dim` dimensions."""

    cos: Tensor  # [num_tokens, rope_dim // 2]
    sin: Tensor
    interleaved: bool

    def __call__(self, x: Tensor, interleaved: bool | None = None) -> Tensor:
        """x: [..., num_tokens, at least rope_dim]: the first of these turn."""
        of_pairs = self.interleaved if interleaved is None else interleaved
        return rotate(x, self.cos.float().repeat(1, 2), self.sin.float().repeat(1, 2), of_pairs)


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """What tokens ask of rows in one layer."""

    q: Tensor  # [num_tokens, num_heads, key_width]
    index_q: Tensor | None  # [num_tokens, num_index_heads, index_head_dim]; None: the layer has no indexer
    index_weights: Tensor | None  # [num_tokens, num_index_heads] float32


def query_latents(inputs: Tensor, weights: LatentWeights, spec: LatentSpec) -> Tensor:
    """What `LatentWeights.queries` reads of inputs [num_tokens, sum of in_widths]: [num_tokens, q_rank] float32."""
    assert spec.q_rank is not None and weights.q_norm is not None
    return functional.rms_norm(inputs[:, : spec.q_rank].float(), (spec.q_rank,), weights.q_norm, EPS)


def latent_rows(inputs: Tensor, weights: LatentWeights, spec: LatentSpec, turn: Turn, width: int) -> Tensor:
    """The tokens' rows [num_tokens, width] float32, behind which there may be zeros."""
    _, key, index_key, _ = torch.split(inputs.float(), list(spec.in_widths), dim=-1)
    latent = functional.rms_norm(key[:, : spec.kv_rank], (spec.kv_rank,), weights.kv_norm, EPS)
    parts = [latent, turn(key[:, spec.kv_rank :])]
    if spec.indexer is not None and weights.index_norm is not None:
        weight, bias = weights.index_norm
        normed = functional.layer_norm(index_key, index_key.shape[1:], weight, bias, EPS)
        parts.append(turn(normed, spec.indexer.interleaved))
    return functional.pad(torch.cat(parts, dim=-1), (0, width - spec.row_width))


def latent_queries(
    inputs: Tensor,
    projected: Tensor,  # [num_tokens, q_width + index_q_width]: what `LatentWeights.queries` gives, or the inputs
    weights: LatentWeights,
    spec: LatentSpec,
    turn: Turn,
) -> LatentQueries:
    """All float32."""
    num_tokens = len(inputs)
    q = projected[:, : spec.q_width].float().view(num_tokens, spec.num_heads, -1)
    nope = torch.einsum("thn,hnc->thc", q[..., : spec.nope_dim], weights.up_k.float())
    turned = turn(q[..., spec.nope_dim :].transpose(0, 1)).transpose(0, 1)
    q, indexer = torch.cat([nope, turned], dim=-1), spec.indexer
    if indexer is None:
        return LatentQueries(q, None, None)
    index_q = projected[:, spec.q_width :].float().view(num_tokens, indexer.num_heads, -1).transpose(0, 1)
    weighed = inputs[:, -indexer.num_heads :].float() * (indexer.num_heads * indexer.head_dim) ** -0.5
    return LatentQueries(q, turn(index_q, indexer.interleaved).transpose(0, 1).contiguous(), weighed)


def choose_rows(asked: LatentQueries, rows: Tensor, lens: Tensor, spec: LatentSpec) -> Tensor:
    """The best of the first lens[t] of rows [num_rows, width] for each token: [num_tokens, top_k] int32, -1 padded."""
    assert spec.top_k is not None and asked.index_q is not None and asked.index_weights is not None
    keys = rows[:, spec.key_width : spec.row_width].contiguous()
    return choose_keys(Operands(asked.index_q.to(keys.dtype), keys, asked.index_weights), spec.top_k, lens)


def attend_latents(
    q: Tensor,  # [num_tokens, num_heads, key_width], of the rows' dtype
    rows: Tensor,  # [num_rows, width], those of the tokens at the end
    chosen: Tensor | None,  # [num_tokens, top_k] int32, -1 padded; None: all rows up to each token's
    spec: LatentSpec,
    softmax_scale: float,
) -> Tensor:
    """[num_tokens, num_heads, kv_rank], as q"""
    if chosen is None and rows.is_cuda:  # where fused kernels have no heads as wide
        return attend_listed(q, rows, spec, softmax_scale)
    if chosen is None:
        keys = rows[None, :, : spec.key_width]
        out = attend_chunk(q.transpose(0, 1).contiguous(), keys, keys, softmax_scale)
        return out.transpose(0, 1)[..., : spec.kv_rank]
    parts = q[..., : spec.kv_rank].contiguous(), q[..., spec.kv_rank :].contiguous()
    latents, turned = rows[:, : spec.kv_rank], rows[:, spec.kv_rank : spec.key_width]
    return sparse_mla(*parts, latents, turned, chosen, softmax_scale)[0]


def attend_listed(q: Tensor, rows: Tensor, spec: LatentSpec, softmax_scale: float) -> Tensor:
    """`attend_latents` to all rows up to each token's, by lists of them."""
    num_tokens, numbers = len(q), torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    last, parts = numbers[len(rows) - num_tokens :, None], []
    for first in range(0, num_tokens, _LISTED):
        some = slice(first, first + _LISTED)
        seen = torch.where(numbers <= last[some], numbers, -1)
        parts.append(attend_latents(q[some], rows, seen, spec, softmax_scale))
    return torch.cat(parts)


def latent_values(attended: Tensor, weights: LatentWeights) -> Tensor:
    """What the output projection reads of [num_tokens, num_heads, kv_rank]: [num_tokens, v_width] float32."""
    return torch.einsum("thc,hvc->thv", attended.float(), weights.up_v.float()).flatten(1)
