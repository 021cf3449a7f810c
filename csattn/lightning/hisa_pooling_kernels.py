"""Block keys kept up to date, in Triton. Definition: `hisa_pooling.PooledKeys.append`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.quantise import FP8_MAX, MEAN_LEAST_SCALE


def append_on_device(
    k: Tensor,
    key_scale: Tensor,
    block_size: int,
    max_len: int,
    sums: Tensor,
    lens: Tensor,
    values: Tensor,
    scales: Tensor,
) -> None:
    """As `PooledKeys.append`, on torch's current stream; the last four are its state."""
    head_dim = k.shape[1]
    _append_kernel[(len(k),)](
        k,
        key_scale,
        sums,
        lens,
        values,
        scales,
        block_size,
        max_len,
        scales.shape[1],
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        LARGEST=FP8_MAX,
        LEAST_SCALE=MEAN_LEAST_SCALE,
        num_warps=1,
        enable_fp_fusion=False,  # the definition rounds a key before it adds it
    )


@triton.jit
def _append_kernel(
    k,  # [batch_size, HEAD_DIM]
    key_scale,  # [batch_size]
    sums,  # [batch_size, HEAD_DIM], added to
    lens,  # [batch_size] int64, counted up
    values,  # [batch_size, max_blocks, HEAD_DIM] float8_e4m3fn, one row of each written
    scales,  # [batch_size, max_blocks], likewise
    block_size,
    max_len,
    max_blocks,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < HEAD_DIM
    kv_len = tl.load(lens + row)
    place = kv_len % block_size
    key = tl.load(k + row * HEAD_DIM + channel, mask=inside, other=0.0).to(tl.float32) * tl.load(key_scale + row)
    before = tl.load(sums + row * HEAD_DIM + channel, mask=inside, other=0.0)
    total = tl.where(place == 0, key, before + key)
    tl.store(sums + row * HEAD_DIM + channel, total, mask=inside)
    mean = tl.div_rn(total, tl.zeros_like(total) + (place + 1).to(tl.float32))
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(mean), axis=0), LARGEST), LEAST_SCALE)
    value = tl.div_rn(mean, tl.zeros_like(mean) + scale)
    value = _round_to_e4m3(tl.minimum(tl.maximum(value, -LARGEST), LARGEST))
    at = row * max_blocks + kv_len // block_size
    has_room = kv_len < max_len
    written = channel < tl.where(has_room, HEAD_DIM, 0)
    tl.store(values + at * HEAD_DIM + channel, value.to(values.dtype.element_ty), mask=written)
    tl.store(scales + at, scale, mask=has_room)
    tl.store(lens + row, kv_len + 1)


@triton.jit
def _round_to_e4m3(x):
    """The nearest e4m3 numbers, ties to even, as float32. (The interpreter's conversion loses the carry of 127.9.)"""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (x * 512.0 + 12582912.0 - 12582912.0) / 512.0  # 1.5 * 2^23 leaves no fraction
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)
