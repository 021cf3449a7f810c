"""The small steps between HISA's launches, in Triton.

Definitions: `hisa.force_blocks`, `hisa.candidate_pages` and `hisa_pooling.PooledKeys.append`.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.hisa_pooling import LEAST_SCALE
from csattn.lightning.quantise import FP8_MAX


def force_on_device(scores: Tensor, num_blocks: Tensor, first_blocks: int, last_blocks: int) -> None:
    """As `hisa.force_blocks`, on torch's current stream."""
    if len(scores) == 0 or first_blocks + last_blocks == 0:
        return
    _force_kernel[(len(scores),)](
        scores,
        num_blocks,
        scores.stride(0),
        first_blocks,
        last_blocks,
        BLOCK=triton.next_power_of_2(first_blocks + last_blocks),
        num_warps=1,
    )


def candidates_on_device(
    candidates: Tensor, pages: Tensor, kv_lens: Tensor, block_size: int, own: Tensor, pool_lens: Tensor
) -> None:
    """As `hisa.candidate_pages`, on torch's current stream; the results are written into the last two."""
    if len(candidates) == 0:
        return
    num_blocks = candidates.shape[1]
    _candidates_kernel[(len(candidates),)](
        candidates,
        pages,
        kv_lens,
        own,
        pool_lens,
        pages.stride(0),
        pages.shape[1],
        num_blocks,
        block_size,
        EACH=own.shape[1] // num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )


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
        LEAST_SCALE=LEAST_SCALE,
        num_warps=1,
        enable_fp_fusion=False,  # the definition rounds a key before it adds it
    )


@triton.jit
def _force_kernel(scores, num_blocks, stride, first_blocks, last_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(num_blocks + row)
    i = tl.arange(0, BLOCK)
    block = tl.where(i < first_blocks, i, end - last_blocks + i - first_blocks)
    forced = (i < first_blocks + last_blocks) & (block >= 0) & (block < end)
    tl.store(scores + row * stride + block, float("inf"), mask=forced)


@triton.jit
def _candidates_kernel(
    candidates,  # [num_queries, num_blocks]
    pages,  # [num_queries, max_pages], rows pages_stride apart
    kv_lens,  # [num_queries]
    own,  # [num_queries, num_blocks * EACH], written
    pool_lens,  # [num_queries], written
    pages_stride,
    max_pages,
    num_blocks,
    block_size,
    EACH: tl.constexpr,  # pages of a block
    BLOCK: tl.constexpr,  # at least num_blocks
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < num_blocks
    block = tl.load(candidates + row * num_blocks + i, mask=inside, other=-1)
    kv_len = tl.load(kv_lens + row)
    missing = tl.maximum((block + 1) * block_size - kv_len, 0)
    tl.store(pool_lens + row, tl.sum(tl.where(block < 0, 0, block_size - missing), axis=0))
    for e in tl.static_range(EACH):
        # the last block of a sequence may have fewer pages than others
        number = block * EACH + e
        there = (block >= 0) & (number * (block_size // EACH) < kv_len) & (number < max_pages)
        page = tl.load(pages + row * pages_stride + number, mask=there, other=-1)
        tl.store(own + (row * num_blocks + i) * EACH + e, page, mask=inside)


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
