"""The number formats of learned indexers: FP8 (e4m3) with a scale per block, and the FP4 (e2m1) grid.

Scales of kind ue8m0 are powers of two, rounded up. Sources: `inference/kernel.py` of DeepSeek-V3.2-Exp; DeepSeek-V4.
"""

import torch
from torch import Tensor

from csattn.errors import ArrayError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128
FP8_LEAST_AMAX = 1e-4
MEAN_LEAST_SCALE = 1e-10  # of a mean of dequantised keys
FP4_MAX = 6.0
FP4_BLOCK = 32
FP4_LEAST_AMAX = 6 * 2.0**-126


def quantise_fp8(
    x: Tensor,  # [..., width]
    *,
    block: int = FP8_BLOCK,
    power_of_two_scales: bool = False,  # ue8m0
) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3 values [..., width] with float32 scales [..., width // block]; x is about values * scales."""
    blocks = _blocks(x, block)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_LEAST_AMAX) / FP8_MAX
    if power_of_two_scales:
        scales = round_up_to_power_of_two(scales)
    values = (blocks / scales).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8)
    return values, scales[..., 0]


def dequantise_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [..., width]: e4m3 values [..., width] times their scales [..., width // block]."""
    if not values.dim() == scales.dim() > 0 or scales.shape[:-1] != values.shape[:-1] or not scales.shape[-1]:
        raise ArrayError(f"values have shape {list(values.shape)}, scales {list(scales.shape)}; wanted the same rows")
    if values.shape[-1] % scales.shape[-1]:
        raise ArrayError(
            f"rows of {values.shape[-1]} values do not divide into {scales.shape[-1]} blocks, a scale each"
        )
    return (_blocks(values, values.shape[-1] // scales.shape[-1]) * scales[..., None]).flatten(-2)


def round_to_fp4(x: Tensor) -> Tensor:
    """Round to the FP4 grid times a power of two per block, ties to even; the result has the shape and dtype of x.

    The grid is 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Exact in bfloat16.
    """
    blocks = _blocks(x, FP4_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=FP4_LEAST_AMAX)
    scales = round_up_to_power_of_two(amax / FP4_MAX)
    scaled = (blocks / scales).clamp(-FP4_MAX, FP4_MAX)
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((scaled / step).round() * step * scales).flatten(-2).to(x.dtype)


def fp4_rows_as_fp8(
    values: Tensor,  # [..., width], on the FP4 grid of each block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers as e4m3 times a power of two per row: values, float32 factors [...], and which rows fit [...].

    An FP4 value has one mantissa bit, so e4m3 represents it exactly between 2^-9 and 384: a row fits if its blocks'
    scales differ by at most 2^14. After a Hadamard transform they hardly differ. A row that does not fit loses bits.
    """
    wide = values.float()
    # so that the largest value becomes 256 or 384
    exponent = wide.abs().amax(-1).clamp(min=2.0**-118).frexp().exponent - 9
    factors = power_of_two(exponent)
    packed = (wide / factors[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    fits = (packed.float() * factors[..., None] == wide).all(-1)
    return packed, factors, fits


def take(values: Tensor, at: slice | Tensor) -> Tensor:
    """Return values[at]; torch does not index FP8 everywhere."""
    return values[at] if values.itemsize > 1 else values.view(torch.uint8)[at].view(values.dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent, exact on every device: int32 in -126..127 -> float32."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Return the least power of two >= x, for positive x of at least 2^-126, as float32; infinity and NaN stay."""
    mantissa, exponent = x.float().frexp()
    return torch.where(x.isfinite(), power_of_two(torch.where(mantissa == 0.5, exponent - 1, exponent)), x.float())


def _blocks(x: Tensor, block: int) -> Tensor:
    if x.dim() == 0 or x.shape[-1] == 0 or block < 1 or x.shape[-1] % block:
        raise ArrayError(f"an array of shape {list(x.shape)} does not divide into blocks of {block}; pad its last axis")
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
