"""Sparse MLA attention in Triton: flash-decoding with a gather. The arguments are those of `attend.sparse_mla`.

A program has some heads of one query and one split of its rows, which it gathers a tile at a time; the selection should
be ascending, so that rows of a page are read together. With several splits, a second launch merges their results.
Softmaxes are sums of powers of two throughout.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from csattn.cuda.triton_start import wait_for_earlier
from csattn.errors import ArrayError
from csattn.lightning.mla.reference import LOG2_E
from csattn.lightning.mla.rows import SelectedRows
from csattn.lightning.triton_common import MOST_QUERIES, launch_options

MAX_SPLITS = 64
ENOUGH_PROGRAMS = 128  # about one for each multiprocessor
MERGED_CHANNELS = 128  # per program; half as many for few heads, to have enough programs
FEW_HEADS = 16
BLOCK_ROWS = 32  # gathered at a time
MOST_SEARCHED = 4096  # indices searched at a time for the end of a selection; a program's code grows with them
# Software pipelining: a row's index is loaded before the row, and each of the two loads is issued two stages ahead. So
# one tile is loaded while another is attended to. With fewer stages nothing overlaps; more do not fit shared memory.
NUM_STAGES = 5


@dataclass(frozen=True, slots=True)
class AttendShape:
    """How a launch is divided into programs."""

    block_heads: int  # heads per program
    block_rows: int  # rows gathered at a time
    num_splits: int  # of a query's selection
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, num_queries: int, num_heads: int, top_k: int) -> "AttendShape":
        """Few heads are memory-bound: use four warps, so that several programs share a multiprocessor. With many, a
        program's sums take the registers of eight warps.
        """
        block_heads = min(64, max(16, triton.next_power_of_2(num_heads)))
        programs = num_queries * -(-num_heads // block_heads)
        most = min(MAX_SPLITS, -(-top_k // BLOCK_ROWS))
        num_splits = max(1, min(most, ENOUGH_PROGRAMS // max(1, programs)))
        num_stages = NUM_STAGES if top_k > num_splits * BLOCK_ROWS else 1  # a single tile: nothing to overlap
        return cls(block_heads, BLOCK_ROWS, num_splits, 4 if block_heads < 64 else 8, num_stages)

    @property
    def smaller(self) -> "AttendShape | None":
        """A shape with less shared memory: few heads, then one tile at a time. None: there is none."""
        if self.block_heads > FEW_HEADS:
            return replace(self, block_heads=FEW_HEADS, num_warps=4)
        return replace(self, num_stages=1) if self.num_stages > 1 else None


def attend_on_device(
    rows: SelectedRows, out: Tensor, lse: Tensor, shape: AttendShape | None = None, lse_unit: float = 1.0
) -> None:
    """Enqueue attention on torch's current stream. Writes `out` and `lse` of `attend.sparse_mla`.

    A shape that takes more shared memory than the device has, such as 64 heads in float32, is replaced by a smaller
    one. Raises ArrayError if there is none.
    """
    num_queries, num_heads, latent_dim = rows.q_nope.shape
    _require_powers_of_two(latent_dim, rows.rope_dim)
    shape = AttendShape.choose(num_queries, num_heads, rows.indices.shape[1]) if shape is None else shape
    try:
        for first in range(0, num_queries, MOST_QUERIES):
            some = slice(first, first + MOST_QUERIES)
            _attend(rows.of_queries(some), out[some], lse[some], shape, lse_unit)
    except OutOfResources as error:  # of the first launch, before it begins
        if (smaller := shape.smaller) is None:
            raise ArrayError(
                f"rows of {latent_dim + rows.rope_dim} channels in {rows.q_nope.dtype} take {error.required} bytes of "
                f"{error.name}, and this device has {error.limit}; attend on the CPU, or in half precision"
            ) from error
        attend_on_device(rows, out, lse, smaller, lse_unit)


def _attend(rows: SelectedRows, out: Tensor, lse: Tensor, shape: AttendShape, lse_unit: float) -> None:
    num_queries, num_heads, latent_dim = rows.q_nope.shape
    splits, device, sink = shape.num_splits, rows.q_nope.device, rows.attn_sink
    if splits == 1:
        _launch_attend(rows, sink, out, lse, shape, lse_unit)
        return
    parts = torch.empty(num_queries, splits, num_heads, latent_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(num_queries, splits, num_heads, dtype=torch.float32, device=device)
    _launch_attend(rows, None, parts, part_lse, shape, lse_unit)
    channels = min(latent_dim, MERGED_CHANNELS if num_heads > FEW_HEADS else MERGED_CHANNELS // 2)
    _merge_kernel[(num_heads, latent_dim // channels, num_queries)](
        *(parts, part_lse, lse if sink is None else sink, out, lse, splits, num_heads, lse_unit / LOG2_E),
        LATENT_DIM=latent_dim,
        HAS_SINK=sink is not None,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        BLOCK_CHANNELS=channels,
        num_warps=4,
        **launch_options(device),
    )


def _launch_attend(
    rows: SelectedRows, sink: Tensor | None, parts: Tensor, part_lse: Tensor, shape: AttendShape, lse_unit: float
) -> None:
    (num_queries, num_heads, latent_dim), top_k = rows.q_nope.shape, rows.indices.shape[1]
    split_len = -(-top_k // (shape.num_splits * shape.block_rows)) * shape.block_rows
    ckv_stride, kpe_stride = rows.ckv.stride(0), 0 if rows.kpe is None else rows.kpe.stride(0)
    _attend_kernel[(shape.num_splits, -(-num_heads // shape.block_heads), num_queries)](
        *(*rows.arrays, part_lse if sink is None else sink, parts, part_lse, ckv_stride, kpe_stride),
        *(len(rows.ckv), num_heads, top_k, split_len, rows.softmax_scale * LOG2_E, lse_unit / LOG2_E),
        LATENT_DIM=latent_dim,
        ROPE_DIM=rows.rope_dim,
        HAS_SINK=sink is not None,
        FAR=len(rows.ckv) * max(ckv_stride, kpe_stride) >= 2**31,
        BLOCK_HEADS=shape.block_heads,
        BLOCK_ROWS=shape.block_rows,
        BLOCK_SPLIT=min(MOST_SEARCHED, triton.next_power_of_2(max(1, split_len))),
        NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        **launch_options(rows.q_nope.device),
    )


def _require_powers_of_two(latent_dim: int, rope_dim: int) -> None:
    for name, dim in (("latent channels", latent_dim), ("RoPE channels", rope_dim)):
        if dim & (dim - 1) or 0 < dim < 16 or (name == "latent channels" and not dim):
            raise ArrayError(f"rows have {dim} {name}; attention on the device takes powers of two, at least 16")


@triton.jit
def _attend_kernel(
    q_nope,  # [num_queries, num_heads, LATENT_DIM]
    q_pe,  # [num_queries, num_heads, ROPE_DIM]
    ckv,  # rows ckv_stride apart
    kpe,  # rows kpe_stride apart
    indices,  # [num_queries, top_k]
    attn_sink,  # [num_heads]
    parts,  # [num_queries, num_splits, num_heads, LATENT_DIM], written
    part_lse,  # [num_queries, num_splits, num_heads], written: in the caller's unit if there is one split, else base 2
    ckv_stride,
    kpe_stride,
    num_rows,
    num_heads,
    top_k,
    split_len,
    scale,  # softmax_scale * log2(e)
    lse_scale,  # from base 2 to the caller's unit
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HAS_SINK: tl.constexpr,
    FAR: tl.constexpr,  # whether rows lie 2^31 or more elements away
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLIT: tl.constexpr,  # indices searched at a time for the end of the selection
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    split = tl.program_id(0)
    query = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    latent = tl.arange(0, LATENT_DIM)
    some = tl.arange(0, BLOCK_ROWS)
    dtype = q_nope.dtype.element_ty
    is_head = head < num_heads
    of_head = query * num_heads + head
    q = tl.load(q_nope + of_head[:, None] * LATENT_DIM + latent[None, :], mask=is_head[:, None], other=0.0)
    if ROPE_DIM:
        rope = tl.arange(0, ROPE_DIM)
        q_rope = tl.load(q_pe + of_head[:, None] * ROPE_DIM + rope[None, :], mask=is_head[:, None], other=0.0)
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, LATENT_DIM], tl.float32)
    indices += query * top_k
    end = tl.minimum(top_k, (split + 1) * split_len)
    if BLOCK_SPLIT > BLOCK_ROWS:  # selections are padded at their end
        last = end
        end = 0
        for first in range(split * split_len, last, BLOCK_SPLIT):
            place = first + tl.arange(0, BLOCK_SPLIT)
            chosen = (place < last) & (tl.load(indices + place, mask=place < last, other=-1) >= 0)
            end = tl.maximum(end, tl.max(tl.where(chosen, place + 1, 0), axis=0))
    for first in tl.range(split * split_len, end, BLOCK_ROWS, num_stages=NUM_STAGES):
        row = tl.load(indices + first + some, mask=first + some < end, other=-1)
        exists = (row >= 0) & (row < num_rows)
        if FAR:
            row = row.to(tl.int64)
        rows = tl.load(ckv + row[:, None] * ckv_stride + latent[None, :], mask=exists[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(rows), input_precision="ieee")
        if ROPE_DIM:
            ropes = tl.load(kpe + row[:, None] * kpe_stride + rope[None, :], mask=exists[:, None], other=0.0)
            logits = tl.dot(q_rope, tl.trans(ropes), logits, input_precision="ieee")
        logits = tl.where(exists[None, :], logits * scale, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, axis=1))
        finite = tl.where(now == float("-inf"), 0.0, now)
        share = tl.math.exp2(logits - finite[:, None])
        shrink = tl.math.exp2(largest - finite)
        total = total * shrink + tl.sum(share, axis=1)
        acc = tl.dot(share.to(dtype), rows, acc * shrink[:, None], input_precision="ieee")
        largest = now
    total = tl.where(total == 0.0, 1.0, total)
    lse = _log_of_sum(largest, total)
    acc = acc / total[:, None]
    if HAS_SINK:
        sink = tl.load(attn_sink + head, mask=is_head, other=0.0) * 1.4426950408889634
        acc = acc / (1.0 + tl.math.exp2(sink - tl.where(lse == float("-inf"), 0.0, lse)))[:, None]
    of_part = (query * tl.num_programs(0) + split) * num_heads + head
    places = parts + of_part[:, None] * LATENT_DIM + latent[None, :]
    tl.store(places, acc.to(parts.dtype.element_ty), mask=is_head[:, None])
    if tl.num_programs(0) == 1:
        lse = lse * lse_scale
    tl.store(part_lse + of_part, lse, mask=is_head)


@triton.jit
def _merge_kernel(
    parts,  # [num_queries, num_splits, num_heads, LATENT_DIM]
    part_lse,  # [num_queries, num_splits, num_heads], base 2
    attn_sink,  # [num_heads]
    out,  # [num_queries, num_heads, LATENT_DIM], written
    lse_out,  # [num_queries, num_heads], written
    num_splits,
    num_heads,
    lse_scale,  # from base 2 to the caller's unit
    LATENT_DIM: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    head = tl.program_id(0)
    query = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    of_part = (query * num_splits + split) * num_heads + head
    # parts without rows are 0; both loads start together
    lse = tl.load(part_lse + of_part, mask=split < num_splits, other=float("-inf"))
    places = parts + of_part[:, None] * LATENT_DIM + channel[None, :]
    rows = tl.load(places, mask=(split < num_splits)[:, None], other=0.0)
    largest = tl.max(lse, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.math.exp2(lse - finite)
    norm = tl.sum(weight, axis=0)
    norm = tl.where(norm == 0.0, 1.0, norm)
    merged = _log_of_sum(largest, norm)
    if HAS_SINK:
        of_rows = tl.where(merged == float("-inf"), 0.0, merged)
        norm = norm * (1.0 + tl.math.exp2(tl.load(attn_sink + head) * 1.4426950408889634 - of_rows))
    result = tl.sum(rows * weight[:, None], axis=0) / norm
    at = query * num_heads + head
    tl.store(out + at * LATENT_DIM + channel, result.to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse_out + at, merged * lse_scale)


@triton.jit
def _log_of_sum(largest, total):
    """Return log2(total * 2 ** largest): -inf without rows, inf if a logit is; NaN stays."""
    return tl.where(largest == float("inf"), largest, largest + tl.math.log2(total))
