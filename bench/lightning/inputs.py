"""Inputs of StreamIndex's protocol: the same numbers from the same generator, in DeepSeek-V4's shape."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from csattn.lightning import FP8, Operands
from csattn.lightning.operands.quantise import fp4_rows_as_fp8, round_to_fp4

SEED = 2026
RATIO = 4  # tokens per key
_ROWS = 1 << 14  # rows quantised at a time
_MLA_CHANNELS, _ROPE_CHANNELS = 512, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of V4-Flash's indexer. V4-Pro's differs only in `dim` (7168), which only affects the weights."""

    num_heads: int = 64
    head_dim: int = 128
    dim: int = 4096


@lru_cache(maxsize=1)
def make_operands(num_tokens: int, shape: Shape, device: str) -> Operands:
    """Make the published inputs: bfloat16 noise of variance 1 / head_dim for q and k, weights a projection of noise."""
    generator = torch.Generator(device).manual_seed(SEED)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.bfloat16, device=device)

    q = noise(num_tokens, shape.num_heads, shape.head_dim).mul_(shape.head_dim**-0.5)
    k = noise(num_tokens // RATIO, shape.head_dim).mul_(shape.head_dim**-0.5)
    x = noise(num_tokens, shape.dim)
    torch.manual_seed(SEED)
    projection = torch.nn.Linear(shape.dim, shape.num_heads, bias=False, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        weights = projection(x).float() * (shape.head_dim**-0.5 * shape.num_heads**-0.5)
    return Operands(q, k, weights)


@lru_cache(maxsize=1)
def make_fp8_operands(num_tokens: int, shape: Shape, device: str) -> Operands:
    """Make the same inputs rounded to the FP4 grid, as in V4, and stored as FP8 for the tensor cores."""
    plain = make_operands(num_tokens, shape, device)
    q = torch.empty(plain.q.shape, dtype=FP8, device=device)
    weights = torch.empty_like(plain.weights)
    for first in range(0, num_tokens, _ROWS):
        rows = slice(first, first + _ROWS)
        q[rows], factors, fits = fp4_rows_as_fp8(round_to_fp4(plain.q[rows]))
        weights[rows] = plain.weights[rows] * factors
        assert fits.all(), "noise spreads less than FP8 holds"
    k, k_factors, fits = fp4_rows_as_fp8(round_to_fp4(plain.k))
    assert fits.all(), "noise spreads less than FP8 holds"
    return Operands(q, k, weights, k_factors)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The inputs of sparse attention over the chosen keys' tokens, except the choice."""

    q_nope: Tensor
    q_pe: Tensor
    ckv: Tensor
    kpe: Tensor


@lru_cache(maxsize=1)
def make_attention_inputs(num_tokens: int, num_heads: int, device: str) -> AttentionInputs:
    """Make noise of V4's shape in StreamIndex's pipeline: rows of 512 + 64 (RoPE) channels, shared by all heads."""
    generator = torch.Generator(device).manual_seed(SEED + 1)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.bfloat16, device=device)

    return AttentionInputs(
        noise(num_tokens, num_heads, _MLA_CHANNELS),
        noise(num_tokens, num_heads, _ROPE_CHANNELS),
        noise(num_tokens, _MLA_CHANNELS),
        noise(num_tokens, _ROPE_CHANNELS),
    )


def forget_inputs() -> None:
    """Free all cached inputs, because the next ones may be as large."""
    for make in (make_operands, make_fp8_operands, make_attention_inputs):
        make.cache_clear()
