"""The score kernel that StreamIndex describes: one program for a query and a block of keys, which sums the heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning import Operands

_BLOCK = 128


def score_chunk(operands: Operands, keys: range) -> Tensor:
    """Score every query with the keys of a chunk: [num_queries, len(keys)] float32."""
    num_queries, num_heads, head_dim = operands.q.shape
    out = torch.empty(num_queries, len(keys), device=operands.q.device)
    _score_kernel[(num_queries, triton.cdiv(len(keys), _BLOCK))](
        operands.q, operands.k[keys.start :], operands.weights, out, len(keys),
        HEADS=num_heads, HEAD_DIM=head_dim, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _score_kernel(q, k, weights, out, num_keys, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    vectors = tl.load(q + (query * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :])
    tile = tl.load(k + keys[None, :] * HEAD_DIM + dims[:, None], (keys < num_keys)[None, :], 0.0)
    products = tl.maximum(tl.dot(vectors, tile), 0.0)
    weight = tl.load(weights + query * HEADS + heads)
    tl.store(out + query * num_keys + keys, tl.sum(products * weight[:, None], 0), keys < num_keys)
