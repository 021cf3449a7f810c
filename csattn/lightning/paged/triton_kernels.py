"""The key cache in Triton: keys written into their pages, in one launch that a graph may hold, and scored.

Keys lie along the rows of the product and heads along its columns, so that most of the sum over heads stays within a
thread. The heads' scores never leave the registers. Where an FP8 product is summed in fewer bits than float32 has
(Hopper), scores differ from the definition's by about 2^-13 of the largest product.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning.operands.quantise import FP8_LEAST_AMAX, FP8_MAX
from csattn.lightning.triton_common import launch_options, round_to_e4m3, wait_for_earlier

ENOUGH_PROGRAMS = 4096  # more tiles than that are shared out among as many programs
TILE_KEYS = 128
NUM_WARPS = 4
# Where a program has several tiles: the pages' numbers are loaded before the pages, and each of the two loads is done
# two stages early. Then one tile is on its way while another is scored; with fewer stages nothing is.
NUM_STAGES = 5


def write_on_device(
    values: Tensor,  # [num_pages, page_size, head_dim] float8_e4m3fn, pages any distance apart, written
    scales: Tensor,  # [num_pages, page_size] float32, likewise
    keys: Tensor,  # [num_tokens, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64; tokens of other slots than the cache has are not written
    power_of_two_scales: bool,
) -> None:
    """As `cache.write_keys`, on torch's current stream."""
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


def score_on_device(
    q: Tensor,
    weights: Tensor,
    values: Tensor,  # [num_pages, page_size, head_dim]
    scales: Tensor,  # [num_pages, page_size]
    pages: Tensor,
    kv_lens: Tensor,
    longer_than: int,
    out: Tensor,
) -> None:
    """As `score.score_pages`, on torch's current stream."""
    num_queries, num_heads, head_dim = q.shape
    if num_heads < 16 or num_heads & (num_heads - 1) or head_dim < 32 or head_dim & (head_dim - 1):
        raise ArrayError(
            f"q has {num_heads} heads of {head_dim}; the kernel takes powers of two, of heads at least 16, of their "
            f"width at least 32"
        )
    if num_queries == 0 or out.shape[1] == 0:
        return
    max_pages = pages.shape[1]
    tile_pages = max(1, TILE_KEYS // values.shape[1])
    num_tiles = -(-max_pages // tile_pages)
    tiles_each = max(1, num_queries * num_tiles // ENOUGH_PROGRAMS)
    _score_kernel[(-(-num_tiles // tiles_each), num_queries)](
        q,
        weights,
        values,
        scales,
        pages,
        kv_lens,
        out,
        values.stride(0),
        scales.stride(0),
        pages.stride(0),
        max_pages,
        len(values),
        longer_than,
        tiles_each,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=values.shape[1],
        TILE_PAGES=tile_pages,
        ONE_TILE=tiles_each == 1,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
        **launch_options(q.device),
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
    value = round_to_e4m3(tl.clamp(tl.div_rn(key, tl.zeros_like(key) + scale), -MAX, MAX))
    page, row = slot // PAGE_SIZE, slot % PAGE_SIZE
    tl.store(values + page * value_stride + row * HEAD_DIM + channel, value.to(values.dtype.element_ty))
    tl.store(scales + page * scale_stride + row, scale)


@triton.jit
def _score_kernel(
    q,  # [num_queries, NUM_HEADS, HEAD_DIM]
    weights,  # [num_queries, NUM_HEADS]
    values,  # [num_pages, PAGE_SIZE, HEAD_DIM], pages value_stride apart
    scales,  # [num_pages, PAGE_SIZE], pages scale_stride apart
    pages,  # [num_queries, max_pages], rows pages_stride apart
    kv_lens,  # [num_queries]
    scores,  # [num_queries, max_pages * PAGE_SIZE], written
    value_stride,
    scale_stride,
    pages_stride,
    max_pages,
    num_pages,
    longer_than,
    tiles_each,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,  # tiles_each is 1
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    query = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, NUM_HEADS)
    channel = tl.arange(0, HEAD_DIM)
    row = tl.arange(0, TILE_PAGES * PAGE_SIZE)
    pages += query * pages_stride
    scores += query * max_pages * PAGE_SIZE
    first = tl.program_id(0) * tiles_each * TILE_PAGES
    # what does not depend on each other is loaded together: each of these takes as long as a page does
    kv_len = tl.minimum(tl.load(kv_lens + query), max_pages * PAGE_SIZE)
    page = tl.load(pages + first + row // PAGE_SIZE, mask=first + row // PAGE_SIZE < max_pages, other=-1)
    of_heads = tl.load(q + query * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + channel[None, :])
    of_heads = tl.trans(of_heads)  # before the loop: then they go to shared memory once, not for every tile
    weight = tl.load(weights + query * NUM_HEADS + head)
    if kv_len <= longer_than or first * PAGE_SIZE >= kv_len:
        return
    in_page = (row % PAGE_SIZE)[:, None] * HEAD_DIM + channel[None, :]
    if ONE_TILE:
        key = first * PAGE_SIZE + row
        exists = (page >= 0) & (page < num_pages) & (key < kv_len)
        at = page.to(tl.int64)
        tile = tl.load(values + (at * value_stride)[:, None] + in_page, mask=exists[:, None], other=0.0)
        scale = tl.load(scales + at * scale_stride + row % PAGE_SIZE, mask=exists, other=0.0)
        score = _sum_over_heads(tile, of_heads, weight) * scale
        tl.store(scores + key, tl.where(exists, score, float("-inf")), mask=key < kv_len)
        return
    end = tl.minimum(kv_len, (first + tiles_each * TILE_PAGES) * PAGE_SIZE)
    for start in tl.range(first * PAGE_SIZE, end, TILE_PAGES * PAGE_SIZE, num_stages=NUM_STAGES):
        key = start + row
        at = tl.load(pages + key // PAGE_SIZE, mask=key < kv_len, other=-1).to(tl.int64)
        exists = (at >= 0) & (at < num_pages)
        tile = tl.load(values + (at * value_stride)[:, None] + in_page, mask=exists[:, None], other=0.0)
        scale = tl.load(scales + at * scale_stride + row % PAGE_SIZE, mask=exists, other=0.0)
        score = _sum_over_heads(tile, of_heads, weight) * scale
        tl.store(scores + key, tl.where(exists, score, float("-inf")), mask=key < kv_len)


@triton.jit
def _sum_over_heads(
    tile,  # [keys, HEAD_DIM]
    of_heads,  # [HEAD_DIM, NUM_HEADS]
    weight,  # [NUM_HEADS]
):
    products = tl.dot(tile, of_heads, input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(products * weight[None, :], axis=1)
