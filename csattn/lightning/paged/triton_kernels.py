"""The key cache in Triton: one kernel writes keys into their pages (a CUDA graph can capture it), one scores pages.

The latter also scores contiguous keys, of shapes that `score.hopper` does not support.

Keys are the rows of the matrix product and heads its columns, so that most of the sum over heads stays within a thread.
The heads' scores never leave the registers. Where FP8 products are accumulated in fewer bits than float32 has (Hopper),
scores differ from the definition's by about 2^-13 of the largest product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csattn.cuda.triton_start import wait_for_earlier
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.operands.quantise import FP8_LEAST_AMAX, FP8_MAX
from csattn.lightning.triton_common import MOST_QUERIES, largest_of, launch_options, to_e4m3

ENOUGH_PROGRAMS = 4096  # if there are more tiles, a program takes several
TILE_KEYS = 128
NUM_WARPS = 4
# Software pipelining, where a program has several tiles: page numbers are loaded before pages, and each of the two
# loads is issued two stages ahead. So one tile is loaded while another is scored; with fewer stages nothing overlaps.
NUM_STAGES = 5


def write_on_device(
    values: Tensor,  # [num_pages, page_size, head_dim] float8_e4m3fn, pages of any stride, written
    scales: Tensor,  # [num_pages, page_size] float32, pages of any stride, written
    keys: Tensor,  # [num_tokens, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64; tokens with a slot outside the cache are not written
    power_of_two_scales: bool,
) -> None:
    """As `cache.write_keys`, on torch's current stream."""
    if not len(keys):
        return
    num_pages, page_size, head_dim = values.shape
    _write_kernel[(len(keys),)](
        *(values, scales, keys, slot_mapping, values.stride(0), scales.stride(0), num_pages * page_size),
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
    """As `score.score_pages`, on torch's current stream; rows of `out` may have any stride."""
    (_, num_heads, head_dim), max_pages = q.shape, pages.shape[1]
    if max_pages == 0:
        return
    tile_pages = max(1, TILE_KEYS // values.shape[1])
    num_tiles = -(-max_pages // tile_pages)
    for first in range(0, len(q), MOST_QUERIES):
        some = slice(first, first + MOST_QUERIES)
        num_queries = len(q[some])
        tiles_each = max(1, num_queries * num_tiles // ENOUGH_PROGRAMS)
        _score_kernel[(-(-num_tiles // tiles_each), num_queries)](
            *(q[some], weights[some], values, scales, pages[some], kv_lens[some], out[some]),
            *(values.stride(0), scales.stride(0), pages.stride(0), out.stride(0)),
            *(max_pages, len(values), longer_than, tiles_each),
            NUM_HEADS=num_heads,
            HEADS=max(16, triton.next_power_of_2(num_heads)),  # 16: the least that a matrix product takes
            HEAD_DIM=head_dim,
            WIDTH=max(32, triton.next_power_of_2(head_dim)),  # 32: the least for FP8
            PAGE_SIZE=values.shape[1],
            TILE_PAGES=tile_pages,
            ONE_TILE=tiles_each == 1,
            NUM_STAGES=NUM_STAGES,
            num_warps=NUM_WARPS,
            **launch_options(q.device),
        )


def score_contiguous(
    operands: Operands,
    keys: range,  # to be scored
    legal_len: Tensor,  # [num_queries] int32; a query's keys from there on are not scored
    out: Tensor,  # [num_queries, at least len(keys)] float32, written
) -> None:
    """As `score.cpu.score_tile`, on torch's current stream: every key is a page."""
    pages = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=operands.k.device)
    arrays = operands.k[:, None], operands.key_scales[:, None], pages.expand(len(operands.q), -1)
    score_on_device(operands.q, operands.weights, *arrays, legal_len - keys.start, 0, out)


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
    scale = tl.div_rn(tl.maximum(largest_of(key), LEAST_AMAX, propagate_nan=tl.PropagateNan.ALL), MAX)
    if POWER_OF_TWO:  # rounded up
        power = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    value = to_e4m3(key, scale, MAX)
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
    scores,  # [num_queries, max_pages * PAGE_SIZE], rows scores_stride apart, written
    value_stride,
    scale_stride,
    pages_stride,
    scores_stride,
    max_pages,
    num_pages,
    longer_than,
    tiles_each,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,  # tiles_each is 1
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    query = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    of_key = channel[None, :] < HEAD_DIM
    row = tl.arange(0, TILE_PAGES * PAGE_SIZE)
    pages += query * pages_stride
    scores += query * scores_stride
    first = tl.program_id(0) * tiles_each * TILE_PAGES
    # independent loads are issued together: each of these takes as long as a page's
    kv_len = tl.minimum(tl.load(kv_lens + query), max_pages * PAGE_SIZE)
    page = tl.load(pages + first + row // PAGE_SIZE, mask=first + row // PAGE_SIZE < max_pages, other=-1)
    of_heads = q + query * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + channel[None, :]
    of_heads = tl.load(of_heads, mask=(head < NUM_HEADS)[:, None] & of_key, other=0.0)
    of_heads = tl.trans(of_heads)  # before the loop: so they go to shared memory once, not for every tile
    weight = tl.load(weights + query * NUM_HEADS + head, mask=head < NUM_HEADS, other=0.0)
    if kv_len <= longer_than or first * PAGE_SIZE >= kv_len:
        return
    in_page = (row % PAGE_SIZE)[:, None] * HEAD_DIM + channel[None, :]
    if ONE_TILE:
        key = first * PAGE_SIZE + row
        exists = (page >= 0) & (page < num_pages) & (key < kv_len)
        at = page.to(tl.int64)
        tile = tl.load(values + (at * value_stride)[:, None] + in_page, mask=exists[:, None] & of_key, other=0.0)
        scale = tl.load(scales + at * scale_stride + row % PAGE_SIZE, mask=exists, other=0.0)
        score = _sum_over_heads(tile, of_heads, weight, NUM_HEADS, HEADS) * scale
        tl.store(scores + key, tl.where(exists, score, float("-inf")), mask=key < kv_len)
        return
    end = tl.minimum(kv_len, (first + tiles_each * TILE_PAGES) * PAGE_SIZE)
    for start in tl.range(first * PAGE_SIZE, end, TILE_PAGES * PAGE_SIZE, num_stages=NUM_STAGES):
        key = start + row
        at = tl.load(pages + key // PAGE_SIZE, mask=key < kv_len, other=-1).to(tl.int64)
        exists = (at >= 0) & (at < num_pages)
        tile = tl.load(values + (at * value_stride)[:, None] + in_page, mask=exists[:, None] & of_key, other=0.0)
        scale = tl.load(scales + at * scale_stride + row % PAGE_SIZE, mask=exists, other=0.0)
        score = _sum_over_heads(tile, of_heads, weight, NUM_HEADS, HEADS) * scale
        tl.store(scores + key, tl.where(exists, score, float("-inf")), mask=key < kv_len)


@triton.jit
def _sum_over_heads(
    tile,  # [keys, WIDTH]
    of_heads,  # [WIDTH, HEADS]
    weight,  # [HEADS]
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    products = tl.dot(tile, of_heads, input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if NUM_HEADS < HEADS:  # padding heads are 0, and infinity times 0 is NaN
        products = tl.where((tl.arange(0, HEADS) < NUM_HEADS)[None, :], products, 0.0)
    return tl.sum(products * weight[None, :], axis=1)
