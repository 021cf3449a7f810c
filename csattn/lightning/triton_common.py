"""What Triton kernels share: how they are launched, and how they quantise to FP8."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl

from csattn.cuda import limits

MOST_QUERIES = 1 << 15  # of a launch: grids end at 65,535 in all dimensions but the first


def launch_options(device: torch.device) -> dict[str, Any]:
    """To be passed to every launch of a kernel that calls `wait_for_earlier`; an interpreted one starts when called."""
    early = device.type == "cuda" and limits().is_hopper
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def largest_of(row):
    """The largest magnitude of a row. NaN stays, which a maximum leaves out."""
    has_nan = tl.max((row != row).to(tl.int32), axis=0) != 0
    return tl.where(has_nan, float("nan"), tl.max(tl.abs(row), axis=0))


@triton.jit
def to_e4m3(row, scale, MAX: tl.constexpr):
    """row / scale as e4m3 numbers: the nearest, of two the even one, at most MAX; zeros keep their sign, NaN stays.

    Conversions round so too, but interpreted ones lose a carry.
    """
    value = tl.clamp(tl.div_rn(row, tl.zeros_like(row) + scale), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, not above |value|
    step = tl.maximum(power, 0.015625) * 0.125
    rounded = (value + step * 12582912.0) - step * 12582912.0  # 1.5 * 2^23: whole numbers only
    return tl.where(rounded == 0.0, value * 0.0, rounded)
