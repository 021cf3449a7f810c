"""What a step does to single heads: RoPE with the append to the tail, the predicted query."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rotate_append_kernel(
    qkv,  # [num_rows, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    q_norm,  # [HEAD_DIM], or qkv when not HAS_NORM
    k_norm,
    cos,  # [num_rows, HEAD_DIM // 2] float32
    sin,
    context_ids,  # [num_rows] int32; -1: append nothing
    tail_ids,
    tail_lens,
    tail,  # [num_tails, NUM_KV_HEADS, tail_capacity, 2, HEAD_DIM]
    q,  # [num_rows, NUM_Q_HEADS, HEAD_DIM] <- rotated
    tail_capacity,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)  # query heads, then key heads
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, BLOCK)
    inside = i < half
    dtype = q.dtype.element_ty
    c = tl.load(cos + row * half + i, mask=inside, other=0.0)
    s = tl.load(sin + row * half + i, mask=inside, other=0.0)
    slot = tl.load(tail_lens + row) - 1
    active = (tl.load(context_ids + row) >= 0) & (slot >= 0) & (slot < tail_capacity)
    tail_id = tl.load(tail_ids + row).to(tl.int64)
    if PDL:  # what is read above is older than the kernel in front, and complete: that one has waited for it
        gdc_wait()
        gdc_launch_dependents()
    heads = qkv + row.to(tl.int64) * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    first = tl.load(heads + head * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + head * HEAD_DIM + half + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm = q_norm if head < NUM_Q_HEADS else k_norm
        first, second = _normed_halves(first, second, norm, i, inside, eps, HEAD_DIM)
    first, second = first * c - second * s, second * c + first * s
    if head < NUM_Q_HEADS:
        at = q + (row.to(tl.int64) * NUM_Q_HEADS + head) * HEAD_DIM
        tl.store(at + i, first.to(dtype), mask=inside)
        tl.store(at + half + i, second.to(dtype), mask=inside)
    elif active:
        at = tail + ((tail_id * NUM_KV_HEADS + head - NUM_Q_HEADS) * tail_capacity + slot) * 2 * HEAD_DIM
        tl.store(at + i, first.to(dtype), mask=inside)
        tl.store(at + half + i, second.to(dtype), mask=inside)
        value = heads + (head + NUM_KV_HEADS) * HEAD_DIM
        tl.store(at + HEAD_DIM + i, tl.load(value + i, mask=inside, other=0.0), mask=inside)
        tl.store(at + HEAD_DIM + half + i, tl.load(value + half + i, mask=inside, other=0.0), mask=inside)


@triton.jit
def predict_query_kernel(
    early,  # [num_rows, num_q_heads, HEAD_DIM]: what the next layer would project from this layer's input
    q_norm,  # [HEAD_DIM], or early when not HAS_NORM
    maps,  # [num_contexts, num_q_heads, HEAD_DIM + 1, HEAD_DIM], contexts maps_stride apart; last row: the offset
    cos,  # [num_rows, HEAD_DIM // 2] float32
    sin,
    context_ids,  # [num_rows] int32; an idle row takes the first context's map
    q,  # [num_rows, num_q_heads, HEAD_DIM] <- [early, 1] @ map, rotated
    maps_stride,
    eps,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, BLOCK)
    inside = i < half
    dtype = q.dtype.element_ty
    c = tl.load(cos + row * half + i, mask=inside, other=0.0)
    s = tl.load(sin + row * half + i, mask=inside, other=0.0)
    context_id = tl.maximum(tl.load(context_ids + row), 0).to(tl.int64)
    matrix = maps + context_id * maps_stride + head * (HEAD_DIM + 1) * HEAD_DIM
    quarter = i[:, None] * HEAD_DIM + i[None, :]
    square = inside[:, None] & inside[None, :]
    upper_left = tl.load(matrix + quarter, mask=square, other=0.0)
    upper_right = tl.load(matrix + half + quarter, mask=square, other=0.0)
    lower_left = tl.load(matrix + half * HEAD_DIM + quarter, mask=square, other=0.0)
    lower_right = tl.load(matrix + half * HEAD_DIM + half + quarter, mask=square, other=0.0)
    first = tl.load(matrix + HEAD_DIM * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(matrix + HEAD_DIM * HEAD_DIM + half + i, mask=inside, other=0.0).to(tl.float32)
    if PDL:  # what is read above is older than the kernel in front, and complete: that one has waited for it
        gdc_wait()
        gdc_launch_dependents()
    at = (row.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM
    x_first = tl.load(early + at + i, mask=inside, other=0.0).to(tl.float32)
    x_second = tl.load(early + at + half + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x_first, x_second = _normed_halves(x_first, x_second, q_norm, i, inside, eps, HEAD_DIM)
        x_first = x_first.to(dtype).to(tl.float32)
        x_second = x_second.to(dtype).to(tl.float32)
    first += tl.sum(x_first[:, None] * upper_left + x_second[:, None] * lower_left, axis=0)
    second += tl.sum(x_first[:, None] * upper_right + x_second[:, None] * lower_right, axis=0)
    first, second = first * c - second * s, second * c + first * s
    tl.store(q + at + i, first.to(dtype), mask=inside)
    tl.store(q + at + half + i, second.to(dtype), mask=inside)


@triton.jit
def _normed_halves(first, second, norm, i, inside, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of one head, given and returned as its two halves."""
    scale = tl.math.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / HEAD_DIM + eps)
    first_weight = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(norm + HEAD_DIM // 2 + i, mask=inside, other=0.0).to(tl.float32)
    return first * scale * first_weight, second * scale * second_weight
