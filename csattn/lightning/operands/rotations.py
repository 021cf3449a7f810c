"""Hadamard transform and RoPE, by elementwise operations: a row's bits do not depend on the other rows."""

import torch
from torch import Tensor

from csattn.errors import ArrayError


def hadamard(x: Tensor) -> Tensor:
    """Multiply x [..., width] by the Hadamard matrix and width ** -0.5, summed in float32; width is a power of two.

    The `rotate_activation` of DeepSeek-V3.2's indexer: an orthogonal transform that spreads outliers.
    """
    width = x.shape[-1]
    if width & (width - 1) or width == 0:
        raise ArrayError(f"rows of {width} values have no Hadamard transform here; wanted a power of two")
    y, half = x.float(), 1
    scale: float = width**-0.5
    while half < width:
        low, high = y.reshape(*x.shape[:-1], width // (2 * half), 2, half).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2)
        half *= 2
    return (y.reshape(x.shape) * scale).to(x.dtype)


def rope(
    x: Tensor,  # [rows, ..., rope_dim]
    positions: Tensor,  # [rows]
    inv_freq: Tensor,  # [rope_dim // 2] float32
    *,
    interleaved: bool,  # pairs are (0, 1), (2, 3), ...; else (0, rope_dim / 2), (1, rope_dim / 2 + 1), ...
) -> Tensor:
    """Apply RoPE to all channels, computed in float32."""
    angles = positions.float()[:, None] * inv_freq
    angles = angles.view(len(angles), *[1] * (x.dim() - 2), len(inv_freq))
    cos, sin = angles.cos(), angles.sin()
    half, side = len(inv_freq), -1 if interleaved else -2
    pairs = x.float().reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    a, b = pairs.unbind(side)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=side).flatten(-2).to(x.dtype)


def rope_last(x: Tensor, positions: Tensor, inv_freq: Tensor, *, interleaved: bool) -> Tensor:
    """Apply `rope` to the last 2 * len(inv_freq) channels of x [rows, ..., width], and keep the others."""
    plain = x.shape[-1] - 2 * len(inv_freq) if x.dim() > 1 else -1
    if plain < 0 or positions.shape != x.shape[:1] or inv_freq.dim() != 1:
        raise ArrayError(
            f"x has shape {list(x.shape)}, positions {list(positions.shape)} and inv_freq {list(inv_freq.shape)}; "
            "wanted [rows, ..., 2 * pairs or more], [rows] and [pairs]"
        )
    return torch.cat((x[..., :plain], rope(x[..., plain:], positions, inv_freq, interleaved=interleaved)), dim=-1)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis in one fixed order, whatever the other axes are: halves are added until one is left."""
    width = x.shape[-1]
    full = 1 << max(0, width - 1).bit_length()
    if full != width:
        x = torch.nn.functional.pad(x, (0, full - width))
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x[..., 0]
