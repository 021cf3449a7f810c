"""Code shared by Triton kernels: launch options and quantisation to FP8."""

from typing import Any

import torch
import triton
import triton.language as tl

from csattn.cuda import limits

MOST_QUERIES = 1 << 15  # per launch: grids are limited to 65,535 in all dimensions but the first


def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that call `wait_for_earlier`: programmatic dependent launch, on Hopper only."""
    early = device.type == "cuda" and limits().is_hopper
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def largest_of(row):
    """The largest magnitude of a row; NaN if it has one, which tl.max would drop."""
    has_nan = tl.max((row != row).to(tl.int32), axis=0) != 0
    return tl.where(has_nan, float("nan"), tl.max(tl.abs(row), axis=0))


@triton.jit
def to_e4m3(row, scale, MAX: tl.constexpr):
    """row / scale rounded to e4m3 values, ties to even, and clamped to +-MAX; zeros keep their sign, NaN stays NaN.

    A conversion to e4m3 rounds the same way, but Triton's interpreter loses a carry in it.
    """
    value = tl.clamp(tl.div_rn(row, tl.zeros_like(row) + scale), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at most |value|
    step = tl.maximum(power, 0.015625) * 0.125
    rounded = (value + step * 12582912.0) - step * 12582912.0  # 1.5 * 2^23: rounds to whole steps
    return tl.where(rounded == 0.0, value * 0.0, rounded)
