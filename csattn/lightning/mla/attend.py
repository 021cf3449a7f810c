"""Attention of each query over selected latent rows (MLA): one row is key and value of all heads.

DeepSeek-V3.2 attends with 512 latent channels, which are the values too, and 64 channels with RoPE; V4 with rows of 512
channels, all of them values, of which the last 64 have RoPE, and with a sink. Decoding and prefill are the same call:
every query brings its own selection, so causality is the selection's business, and memory is that of the result.
"""

import torch
from torch import Tensor

from csattn.errors import ArrayError, ConfigError
from csattn.lightning.checks import require_array
from csattn.lightning.mla.hopper import attend_many, takes
from csattn.lightning.mla.reference import sparse_mla_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_BYTES = 1 << 28  # of gathered rows, where torch attends


def sparse_mla(
    q_nope: Tensor,  # [num_queries, num_heads, latent_dim]
    q_pe: Tensor | None,  # [num_queries, num_heads, rope_dim]; None: rows have no other channels
    ckv: Tensor,  # [num_rows, latent_dim]; rows may lie any distance apart
    kpe: Tensor | None,  # [num_rows, rope_dim]; likewise
    indices: Tensor,  # [num_queries, top_k] int32, of rows, each at most once; others than 0..num_rows-1 are skipped
    softmax_scale: float,
    *,
    attn_sink: Tensor | None = None,  # [num_heads] float32, a logit that takes its share of each head's softmax
    out: Tensor | None = None,  # like q_nope
    lse: Tensor | None = None,  # [num_queries, num_heads] float32
    lse_unit: float = 1.0,  # what lse is multiplied by: log2(e) for base 2
) -> tuple[Tensor, Tensor]:
    """Output like q_nope, and the log-sum-exp [num_queries, num_heads] float32 (natural, without the sink).

    A query without rows gets 0 and -inf. Definition: `sparse_mla_reference`. On a GPU the sum over rows is split among
    programs and merged in a fixed order: the same call gives the same bits.
    """
    _require(q_nope, q_pe, ckv, kpe, indices, softmax_scale, attn_sink)
    if out is None:
        out = torch.empty_like(q_nope)
    if lse is None:
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    require_array("out", out, tuple(q_nope.shape), q_nope.dtype, like=q_nope)
    require_array("lse", lse, tuple(q_nope.shape[:2]), torch.float32, like=q_nope)
    if q_nope.device.type == "cuda":
        from csattn.lightning.mla.triton_kernels import attend_on_device  # Triton is only where a GPU is

        arguments = q_nope, q_pe, ckv, kpe, indices, softmax_scale, attn_sink, out, lse
        if not takes(q_nope, q_pe, ckv, kpe):
            attend_on_device(*arguments, lse_unit=lse_unit)
            return out, lse
        attend_many(*arguments)
        return out, lse.mul_(lse_unit) if lse_unit != 1 else lse
    step = max(1, CHUNK_BYTES // max(1, 8 * indices.shape[1] * q_nope.shape[2]))
    for first in range(0, len(q_nope), step):
        some = slice(first, first + step)
        of_pe = None if q_pe is None else q_pe[some]
        out[some], lse[some] = sparse_mla_reference(
            q_nope[some], of_pe, ckv, kpe, indices[some], softmax_scale, attn_sink
        )
    return out, lse.mul_(lse_unit)


def _require(
    q_nope: Tensor,
    q_pe: Tensor | None,
    ckv: Tensor,
    kpe: Tensor | None,
    indices: Tensor,
    softmax_scale: float,
    attn_sink: Tensor | None,
) -> None:
    require_array("q_nope", q_nope, ("num_queries", "num_heads", "latent_dim"), *DTYPES)
    num_queries, num_heads, latent_dim = q_nope.shape
    require_array("ckv", ckv, ("num_rows", latent_dim), q_nope.dtype, like=q_nope, rows_apart=True)
    if (q_pe is None) != (kpe is None):
        raise ArrayError("one of q_pe and kpe is missing; give both, or neither if rows have no other channels")
    if q_pe is not None and kpe is not None:
        require_array("q_pe", q_pe, (num_queries, num_heads, "rope_dim"), q_nope.dtype, like=q_nope)
        require_array("kpe", kpe, (len(ckv), q_pe.shape[2]), q_nope.dtype, like=q_nope, rows_apart=True)
    require_array("indices", indices, (num_queries, "top_k"), torch.int32, like=q_nope)
    if attn_sink is not None:
        require_array("attn_sink", attn_sink, (num_heads,), torch.float32, like=q_nope)
    if not isinstance(softmax_scale, float) or not 0 < softmax_scale < float("inf"):
        raise ConfigError(f"softmax_scale is {softmax_scale!r}; wanted a positive number")
