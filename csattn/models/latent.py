"""Reference for attention in latent space (MLA, arXiv:2405.04434), in torch: for decode steps and for prefill.

The up-projections of latents are absorbed into queries and outputs, so that rows are read as they are stored. If the
model has a learned indexer (arXiv:2512.02556, `csattn.lightning`), a token attends only to the rows that it chooses.
"""

import torch
from torch import Tensor
from torch.nn import functional

from csattn.attention import attend_chunk
from csattn.lightning import Operands, choose_keys, sparse_mla
from csattn.models.latent_spec import LatentSpec
from csattn.models.query import Queries, Rotation
from csattn.models.weights import LatentWeights

_LISTED = 64  # tokens whose lists of rows are in memory at a time
EPS = 1e-6  # of the norms of latents and index keys, whatever the model's other norms have


def query_latents(inputs: Tensor, weights: LatentWeights, spec: LatentSpec) -> Tensor:
    """Return the normed latents of queries, [num_tokens, q_rank] float32: the input of `LatentWeights.queries`.

    inputs: [num_tokens, sum of in_widths], the outputs of `LatentWeights.inputs`.
    """
    assert spec.q_rank is not None and weights.q_norm is not None
    return functional.rms_norm(inputs[:, : spec.q_rank].float(), (spec.q_rank,), weights.q_norm, EPS)


def latent_rows(inputs: Tensor, weights: LatentWeights, spec: LatentSpec, rope: Rotation, width: int) -> Tensor:
    """Return the tokens' rows [num_tokens, width] float32, padded with zeros from `row_width` to width.

    inputs: as in `query_latents`.
    """
    _, key, index_key, _ = torch.split(inputs.float(), list(spec.in_widths), dim=-1)
    latent = functional.rms_norm(key[:, : spec.kv_rank], (spec.kv_rank,), weights.kv_norm, EPS)
    parts = [latent, rope(key[:, spec.kv_rank :])]
    if spec.indexer is not None and weights.index_norm is not None:
        weight, bias = weights.index_norm
        normed = functional.layer_norm(index_key, index_key.shape[1:], weight, bias, EPS)
        parts.append(rope(normed, spec.indexer.interleaved))
    return functional.pad(torch.cat(parts, dim=-1), (0, width - spec.row_width))


def latent_queries(
    inputs: Tensor,
    projected: Tensor,  # [num_tokens, q_width + index_q_width]: outputs of `LatentWeights.queries`, or the inputs
    weights: LatentWeights,
    spec: LatentSpec,
    rope: Rotation,
) -> Queries:
    """Return the queries, all float32; index heads' weights include the scale of their scores."""
    num_tokens = len(inputs)
    q = projected[:, : spec.q_width].float().view(num_tokens, spec.num_heads, -1)
    nope = torch.einsum("thn,hnc->thc", q[..., : spec.nope_dim], weights.up_k.float())
    rotated, indexer = rope(q[..., spec.nope_dim :]), spec.indexer
    q = torch.cat([nope, rotated], dim=-1) * rope.q_scale[:, None, None]
    if indexer is None:
        return Queries(q, None, None)
    index_q = projected[:, spec.q_width :].float().view(num_tokens, indexer.num_heads, -1)
    weighed = inputs[:, -indexer.num_heads :].float() * (indexer.num_heads * indexer.head_dim) ** -0.5
    return Queries(q, rope(index_q, indexer.interleaved), weighed)


def choose_rows(queries: Queries, rows: Tensor, lens: Tensor, spec: LatentSpec) -> Tensor:
    """Choose the best among the first lens[t] of rows [num_rows, width] for token t, by the indexer.

    Return [num_tokens, top_k] int32, -1 padded.
    """
    assert spec.top_k is not None and queries.index_q is not None and queries.index_weights is not None
    keys = rows[:, spec.key_width : spec.row_width].contiguous()
    return choose_keys(Operands(queries.index_q.to(keys.dtype), keys, queries.index_weights), spec.top_k, lens)


def attend_latents(
    q: Tensor,  # [num_tokens, num_heads, key_width], of the rows' dtype
    rows: Tensor,  # [num_rows, width]; the tokens' own are the last
    chosen: Tensor | None,  # [num_tokens, top_k] int32, -1 padded; None: all rows up to each token's (causal)
    spec: LatentSpec,
    softmax_scale: float,
) -> Tensor:
    """Return attention's output in latent space, [num_tokens, num_heads, kv_rank], dtype of q."""
    if chosen is None and rows.is_cuda:  # fused kernels on GPUs have no heads of this width
        return attend_listed(q, rows, spec, softmax_scale)
    if chosen is None:
        keys = rows[None, :, : spec.key_width]
        out = attend_chunk(q.transpose(0, 1).contiguous(), keys, keys, softmax_scale)
        return out.transpose(0, 1)[..., : spec.kv_rank]
    parts = q[..., : spec.kv_rank].contiguous(), q[..., spec.kv_rank :].contiguous()
    latents, rotated = rows[:, : spec.kv_rank], rows[:, spec.kv_rank : spec.key_width]
    return sparse_mla(*parts, latents, rotated, chosen, softmax_scale)[0]


def attend_listed(q: Tensor, rows: Tensor, spec: LatentSpec, softmax_scale: float) -> Tensor:
    """Attend to all rows up to each token's, like `attend_latents` without `chosen`, by explicit lists of rows."""
    num_tokens, numbers = len(q), torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    last, parts = numbers[len(rows) - num_tokens :, None], []
    for first in range(0, num_tokens, _LISTED):
        some = slice(first, first + _LISTED)
        seen = torch.where(numbers <= last[some], numbers, -1)
        parts.append(attend_latents(q[some], rows, seen, spec, softmax_scale))
    return torch.cat(parts)


def latent_values(attended: Tensor, weights: LatentWeights) -> Tensor:
    """Map attended latents [num_tokens, num_heads, kv_rank] to the output projection's input.

    Return [num_tokens, v_width] float32.
    """
    return torch.einsum("thc,hvc->thv", attended.float(), weights.up_v.float()).flatten(1)
