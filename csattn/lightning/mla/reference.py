"""Sparse MLA attention by definition."""

from math import e, log2

import torch
from torch import Tensor

LOG2_E = log2(e)


def sparse_mla_reference(
    q_nope: Tensor,
    q_pe: Tensor | None,
    ckv: Tensor,
    kpe: Tensor | None,
    indices: Tensor,
    softmax_scale: float,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in float64, with all selected rows in memory. Arguments and results are those of `attend.sparse_mla`."""
    exists = (indices >= 0) & (indices < len(ckv))
    if not len(ckv):
        ckv, kpe = (None if x is None else x.new_zeros(1, x.shape[1]) for x in (ckv, kpe))  # type: ignore[assignment]
    at = torch.where(exists, indices, 0).long()
    rows = ckv[at].double().masked_fill(~exists[..., None], 0.0)
    logits = torch.einsum("qhd,qkd->qhk", q_nope.double(), rows)
    if q_pe is not None and kpe is not None:
        logits += torch.einsum("qhd,qkd->qhk", q_pe.double(), kpe[at].double())
    logits = (logits * softmax_scale).masked_fill(~exists[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    finite = torch.where(lse == -torch.inf, 0.0, lse)  # without rows, shares are 0; NaN stays
    shares = (logits - finite[..., None]).exp()
    if attn_sink is not None:
        shares = shares * torch.sigmoid(finite - attn_sink.double())[..., None]
    return torch.einsum("qhk,qkd->qhd", shares, rows).to(q_nope.dtype), lse.float()
