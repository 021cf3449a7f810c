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


def lists_on_device(
    candidates: Tensor,
    num_keys: Tensor,
    longer_than: int,
    item_queries: int,
    lists: Tensor,
    counts: Tensor,
    items: Tensor,
) -> None:
    """The queries of each block, as `hisa_score` takes them; the last three are written, counts are 0 before."""
    num_queries, num_candidates = candidates.shape
    if num_queries == 0:
        return
    _lists_kernel[(num_queries,)](
        candidates,
        num_keys,
        lists,
        counts,
        items,
        len(lists),
        num_queries,
        num_candidates,
        longer_than,
        ITEM_QUERIES=item_queries,
        BLOCK=triton.next_power_of_2(num_candidates),
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


@triton.jit
def _lists_kernel(
    candidates,  # [num_queries, num_candidates], -1 padded
    num_keys,  # [num_queries]
    lists,  # [num_blocks, num_queries], written
    counts,  # [num_blocks + 2], counted up
    items,  # written
    num_blocks,
    num_queries,
    num_candidates,
    longer_than,
    ITEM_QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_candidates
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = (i < num_candidates) & (tl.load(num_keys + row) + tl.zeros_like(i) > longer_than)
    block = tl.load(candidates + row.to(tl.int64) * num_candidates + i, mask=inside, other=-1)
    listed = (block >= 0) & (block < num_blocks)
    at = tl.atomic_add(counts + block, 1, listed, sem="relaxed")
    tl.store(lists + block.to(tl.int64) * num_queries + at, row * num_candidates + i, listed)
    begins = listed & (at % ITEM_QUERIES == 0)
    number = tl.atomic_add(counts + num_blocks + tl.zeros_like(i), 1, begins, sem="relaxed")
    tl.store(items + number, block * tl.cdiv(num_queries, ITEM_QUERIES) + at // ITEM_QUERIES, begins)
