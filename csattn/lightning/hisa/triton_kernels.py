"""HISA's small steps in Triton: those between its other launches, and the update of block keys."""

import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.operands.quantise import FP8_MAX, MEAN_LEAST_SCALE
from csattn.lightning.triton_common import largest_of, to_e4m3


def max_blocks_on_device(kv_lens: Tensor, block_size: int, queries_each: int, max_blocks: Tensor) -> None:
    """Write to `max_blocks` how many any query of a tile sees at most: [num_queries] int32 -> [query tiles] int32."""
    if len(max_blocks) == 0:
        return
    sizes = len(kv_lens), block_size
    _max_blocks_kernel[(len(max_blocks),)](kv_lens, max_blocks, *sizes, QUERIES=queries_each, num_warps=1)


def pages_on_device(candidates: Tensor, pages: Tensor, kv_lens: Tensor, block_size: int, own: Tensor) -> None:
    """As `reference.candidate_pages_reference`, on torch's current stream; the result is written into `own`."""
    if len(candidates) == 0:
        return
    num_blocks = candidates.shape[1]
    _pages_kernel[(len(candidates),)](
        *(candidates, pages, kv_lens, own, pages.stride(0), pages.shape[1], num_blocks, block_size),
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
    """As `pooling.PooledKeys.append`, on torch's current stream; the last four are its state."""
    head_dim = k.shape[1]
    _append_kernel[(len(k),)](
        *(k, key_scale, sums, lens, values, scales, block_size, max_len, scales.shape[1]),
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        LARGEST=FP8_MAX,
        LEAST_SCALE=MEAN_LEAST_SCALE,
        num_warps=1,
        enable_fp_fusion=False,  # the definition rounds a key before it adds it
    )


@triton.jit
def _max_blocks_kernel(
    kv_lens,  # [num_queries]
    max_blocks,  # [programs], written
    num_queries,
    block_size,
    QUERIES: tl.constexpr,
):
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    kv_len = tl.load(kv_lens + query, mask=query < num_queries, other=0)
    tl.store(max_blocks + tl.program_id(0), tl.cdiv(tl.max(kv_len, axis=0), block_size))


@triton.jit
def _pages_kernel(
    candidates,  # [num_queries, num_blocks]
    pages,  # [num_queries, max_pages], rows pages_stride apart
    kv_lens,  # [num_queries]
    own,  # [num_queries, num_blocks * EACH], written
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
    scales,  # [batch_size, max_blocks], one of each row written
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
    scale = tl.maximum(tl.div_rn(largest_of(mean), LARGEST), LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    value = to_e4m3(mean, scale, LARGEST)
    at = row * max_blocks + kv_len // block_size
    has_room = kv_len < max_len
    written = channel < tl.where(has_room, HEAD_DIM, 0)
    tl.store(values + at * HEAD_DIM + channel, value.to(values.dtype.element_ty), mask=written)
    tl.store(scales + at, scale, mask=has_room)
    tl.store(lens + row, kv_len + 1)
