"""Low-bit KV with full attention over all rows: the published alternatives that a user could take instead.

* KIVI (arXiv:2402.02750): min-max quantisation, keys per channel in groups of 32 rows, values per row in groups of 32
  dimensions, with a float16 scale and zero point for each group.
* TurboQuant (arXiv:2504.19874): a random rotation, then the best levels for a normal distribution; a float16 norm per
  vector. Its 3.5 bits are 4 for the half of the channels that are largest in the context and 3 for the others, each
  half with a rotation and norms of its own.
* q4_0 of llama.cpp: blocks of 32 numbers, each with a float16 scale.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer

_GROUP = 32  # numbers that share a scale
_HALF_BYTES = 2


class LowBitRows(Codes):
    """Keys and values after quantisation and dequantisation."""

    fixed_bytes = 0

    def __init__(self, k: Tensor, v: Tensor, bytes_per_key: float):
        self.k, self.v = k, v
        self.bytes_per_key = bytes_per_key

    def logits(self, q: Tensor) -> Tensor:
        return q @ self.k.mT

    def weighted_values(self, weights: Tensor, q: Tensor) -> Tensor:
        return weights @ self.v


def kivi(bits: int) -> Callable[[ContextLayer], Codes]:
    def make(layer: ContextLayer) -> Codes:
        per_number = bits / 8 + 2 * _HALF_BYTES / _GROUP
        keys = _by_range(layer.k.mT, bits).mT
        return LowBitRows(keys, _by_range(layer.v, bits), 2 * layer.k.shape[2] * per_number)

    return make


def turbo_quant(*bits: int) -> Callable[[ContextLayer], Codes]:
    """Quantise equal shares of the channels, the largest channels first, with bits[i] bits for the i-th share."""

    def make(layer: ContextLayer) -> Codes:
        num_bytes = layer.k.shape[2] * sum(bits) / len(bits) / 8 + len(bits) * _HALF_BYTES
        return LowBitRows(_turned(layer.k, bits), _turned(layer.v, bits), 2 * num_bytes)

    return make


def q4_0(layer: ContextLayer) -> Codes:
    k, v = (decoded_q4_0(*coded_q4_0(rows)) for rows in (layer.k, layer.v))
    return LowBitRows(k, v, 2 * layer.k.shape[2] * (4 / 8 + _HALF_BYTES / _GROUP))


def _by_range(rows: Tensor, bits: int) -> Tensor:
    codes, low, scale = coded_by_range(rows, bits)
    return (low + codes * scale).flatten(-2)[..., : rows.shape[-1]]


def coded_by_range(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [..., num_groups, _GROUP], and each group's minimum and scale [..., num_groups, 1].

    Groups lie along the last axis; the last one is padded if it is shorter. Levels are spaced evenly from a group's
    minimum to its maximum.
    """
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _GROUP), mode="replicate").unflatten(-1, (-1, _GROUP))
    low, high = padded.amin(-1, keepdim=True), padded.amax(-1, keepdim=True)
    low, scale = low.half().float(), ((high - low) / (2**bits - 1)).half().float()
    return ((padded - low) / scale.clamp_min(1e-12)).round().clamp(0, 2**bits - 1), low, scale


def _turned(rows: Tensor, bits: tuple[int, ...]) -> Tensor:
    order, parts = largest_channels(rows), []
    for num, (codes, norm, turn) in zip(bits, coded_turned(rows, order, bits), strict=True):
        parts.append(normal_levels(num).to(rows)[codes] / len(turn) ** 0.5 @ turn.T * norm)
    return torch.empty_like(rows).scatter_(2, order.expand_as(rows), torch.cat(parts, dim=2))


def largest_channels(rows: Tensor) -> Tensor:
    """Return each head's channels, largest mean square first: [num_heads, 1, width] of [num_heads, num_rows, width]."""
    return rows.square().mean(1).argsort(dim=-1, descending=True)[:, None]


def coded_turned(rows: Tensor, order: Tensor, bits: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each share of the channels, level indices, norms [num_heads, num_rows, 1] and the rotation used."""
    parts = []
    for part, num in zip(rows.gather(2, order.expand_as(rows)).chunk(len(bits), dim=2), bits, strict=True):
        width, levels = part.shape[2], normal_levels(num).to(rows.device)
        random = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        turn = torch.linalg.qr(random)[0].float().to(rows.device)
        norm = part.norm(dim=-1, keepdim=True).half().float()
        scaled = part / norm.clamp_min(1e-12) @ turn * width**0.5
        parts.append((torch.bucketize(scaled.contiguous(), (levels[1:] + levels[:-1]) / 2), norm, turn))
    return parts


@cache
def normal_levels(bits: int) -> Tensor:
    """Return the 2**bits levels with the least squared error for a standard normal, by Lloyd's iteration."""
    x = torch.linspace(-6, 6, 24001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    levels = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(500):
        cell = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        sums, weights = (torch.zeros_like(levels).scatter_add_(0, cell, t) for t in (x * density, density))
        levels = sums / weights
    return levels.float()


def coded_q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., num_blocks, _GROUP], where 8 stands for 0, and scales [..., num_blocks, 1].

    As in llama.cpp, the number with the largest magnitude of a block becomes -8.
    """
    blocks = rows.unflatten(-1, (-1, _GROUP))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    return (blocks * inverse + 8.5).floor().clamp(0, 15), scale


def decoded_q4_0(codes: Tensor, scale: Tensor) -> Tensor:
    return ((codes - 8) * scale).flatten(-2)
