"""Index keys written into their pages in one launch, which a graph may hold. Definition: `key_cache.write_keys`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.early_kernels import launch_options, wait_for_earlier
from csattn.lightning.quantise import FP8_LEAST_AMAX, FP8_MAX


def write_on_device(
    values: Tensor,  # [num_pages, page_size, head_dim] float8_e4m3fn, pages any distance apart, written
    scales: Tensor,  # [num_pages, page_size] float32, likewise
    keys: Tensor,  # [num_tokens, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64; tokens of other slots than the cache has are not written
    power_of_two_scales: bool,
) -> None:
    """Enqueue on torch's current stream."""
    if not len(keys):
        return
    num_pages, page_size, head_dim = values.shape
    _write_kernel[(len(keys),)](
        values,
        scales,
        keys,
        slot_mapping,
        values.stride(0),
        scales.stride(0),
        num_pages * page_size,
        LEAST_AMAX=FP8_LEAST_AMAX,
        MAX=FP8_MAX,
        POWER_OF_TWO=power_of_two_scales,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        num_warps=1,
        **launch_options(keys.device),
    )


@triton.jit
def _write_kernel(
    values,
    scales,
    keys,
    slot_mapping,
    value_stride,
    scale_stride,
    num_slots,
    LEAST_AMAX: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    key = tl.load(keys + token * HEAD_DIM + channel).to(tl.float32)
    if slot < 0 or slot >= num_slots:
        return
    has_nan = tl.max((key != key).to(tl.int32), axis=0) != 0
    largest = tl.where(has_nan, float("nan"), tl.maximum(tl.max(tl.abs(key), axis=0), LEAST_AMAX))
    scale = tl.div_rn(largest, MAX)
    if POWER_OF_TWO:  # rounded up
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    value = _round_to_e4m3(tl.clamp(tl.div_rn(key, tl.zeros_like(key) + scale), -MAX, MAX))
    page, row = slot // PAGE_SIZE, slot % PAGE_SIZE
    tl.store(values + page * value_stride + row * HEAD_DIM + channel, value.to(values.dtype.element_ty))
    tl.store(scales + page * scale_stride + row, scale)


@triton.jit
def _round_to_e4m3(value):
    """To the nearest, of two the even one. Conversions do so too, but interpreted ones lose a carry."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, not above |value|
    step = tl.maximum(power, 0.015625) * 0.125
    return (value + step * 12582912.0) - step * 12582912.0  # 1.5 * 2^23: whole numbers only
