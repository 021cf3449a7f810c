"""Attention of each query over selected latent rows (MLA): one row is key and value of all heads.

DeepSeek-V3.2's rows have 512 latent channels, which are also the values, and 64 channels with RoPE; V4's have 512
channels, all of them values, of which the last 64 have RoPE, and its heads have sinks. Decoding and prefill are the
same call: every query has its own selection, which alone makes attention causal, and memory is that of the result.
"""

import torch
from torch import Tensor

from csattn.lightning.checks import require_array
from csattn.lightning.mla import hopper
from csattn.lightning.mla.reference import sparse_mla_reference
from csattn.lightning.mla.rows import SelectedRows

CHUNK_BYTES = 1 << 28  # of gathered rows, on the CPU


def sparse_mla(
    q_nope: Tensor,  # [num_queries, num_heads, latent_dim]
    q_pe: Tensor | None,  # [num_queries, num_heads, rope_dim]; None: rows have only latent channels
    ckv: Tensor,  # [num_rows, latent_dim]; rows may have any stride
    kpe: Tensor | None,  # [num_rows, rope_dim]; rows may have any stride
    indices: Tensor,  # [num_queries, top_k] int32: rows, each at most once; numbers outside 0..num_rows-1 are skipped
    softmax_scale: float,
    *,
    attn_sink: Tensor | None = None,  # [num_heads] float32: a logit without a row in each head's softmax
    out: Tensor | None = None,  # like q_nope
    lse: Tensor | None = None,  # [num_queries, num_heads] float32
    lse_unit: float = 1.0,  # what lse is multiplied by: log2(e) for base 2
) -> tuple[Tensor, Tensor]:
    """Return the output, like q_nope, and the log-sum-exp [num_queries, num_heads] float32 (natural, without the sink).

    A query without rows gets 0 and -inf. Definition: `sparse_mla_reference`. On a GPU the sum over rows is split among
    programs and merged in a fixed order: the same call gives the same bits.
    """
    rows = SelectedRows(q_nope, q_pe, ckv, kpe, indices, softmax_scale, attn_sink)
    rows.check()
    if out is None:
        out = torch.empty_like(q_nope)
    if lse is None:
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    require_array("out", out, tuple(q_nope.shape), q_nope.dtype, like=q_nope)
    require_array("lse", lse, tuple(q_nope.shape[:2]), torch.float32, like=q_nope)
    if hopper.supports(rows):
        hopper.attend_many(rows, out, lse)
    elif q_nope.device.type == "cuda":
        from csattn.lightning.mla.triton_kernels import attend_on_device  # needs Triton: GPU only

        attend_on_device(rows, out, lse, lse_unit=lse_unit)
        return out, lse
    else:
        step = max(1, CHUNK_BYTES // max(1, 8 * indices.shape[1] * q_nope.shape[2]))
        for first in range(0, len(q_nope), step):
            some = slice(first, first + step)
            own = rows.of_queries(some)
            of_queries = own.q_nope, own.q_pe, ckv, kpe, own.indices
            out[some], lse[some] = sparse_mla_reference(*of_queries, softmax_scale, attn_sink)
    return out, lse.mul_(lse_unit) if lse_unit != 1 else lse
