"""What Triton kernels share: how they are launched, and rounding to FP8."""

# Triton kernels are untyped, and their constants upper case by custom.
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
def round_to_e4m3(value):
    """To the nearest e4m3 number, of two the even one. Conversions do so too, but interpreted ones lose a carry."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, not above |value|
    step = tl.maximum(power, 0.015625) * 0.125
    return (value + step * 12582912.0) - step * 12582912.0  # 1.5 * 2^23: whole numbers only
