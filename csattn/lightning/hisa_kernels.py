"""The small steps between HISA's launches, in Triton. Definition: `hisa.candidate_pages`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor


def longest_on_device(kv_lens: Tensor, block_size: int, queries_each: int, longest: Tensor) -> None:
    """The most blocks that one of so many queries sees: [num_queries] int32 -> [tiles of queries] int32, written."""
    if len(longest) == 0:
        return
    sizes = len(kv_lens), block_size
    _longest_kernel[(len(longest),)](kv_lens, longest, *sizes, QUERIES=queries_each, num_warps=1)


def pages_on_device(candidates: Tensor, pages: Tensor, kv_lens: Tensor, block_size: int, own: Tensor) -> None:
    """As `hisa.candidate_pages`, on torch's current stream; the result is written into the last."""
    if len(candidates) == 0:
        return
    num_blocks = candidates.shape[1]
    _pages_kernel[(len(candidates),)](
        candidates,
        pages,
        kv_lens,
        own,
        pages.stride(0),
        pages.shape[1],
        num_blocks,
        block_size,
        EACH=own.shape[1] // num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )


@triton.jit
def _longest_kernel(
    kv_lens,  # [num_queries]
    longest,  # [programs], written
    num_queries,
    block_size,
    QUERIES: tl.constexpr,
):
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    kv_len = tl.load(kv_lens + query, mask=query < num_queries, other=0)
    tl.store(longest + tl.program_id(0), tl.cdiv(tl.max(kv_len, axis=0), block_size))


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
