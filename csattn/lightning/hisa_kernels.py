"""The small steps between HISA's launches, in Triton. Definitions: `hisa.force_blocks` and `hisa.candidate_pages`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor


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
