"""Kernels for heads: norms and RoPE with the append to the tail, the predicted query, and the gates of outputs."""

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier
from workers.model.gpu.linear_kernels import activated


@triton.jit
def rotate_append_kernel(
    qkv,  # [num_rows, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    q_norm,  # float32 [HEAD_DIM], or of all heads when NORM is "projection", or qkv when it is "none"
    k_norm,
    v_norm,  # float32 [HEAD_DIM], or anything when not V_NORMED
    cos,  # [num_rows, HALF] float32: the first 2 * HALF dimensions are rotated
    sin,
    q_scale,  # [num_rows] float32
    tail_ids,
    tail_lens,  # 0: append nothing
    tail_starts,
    tail,  # [num_tails, NUM_KV_HEADS, tail_capacity, 2, HEAD_DIM]
    q,  # [num_rows, NUM_Q_HEADS, HEAD_DIM] <- rotated
    tail_capacity,
    eps,
    NORM: tl.constexpr,  # "none", "head", "projection" or "after_rope": of a head, with weights after RoPE
    V_NORMED: tl.constexpr,
    ROTATED: tl.constexpr,  # False: neither rotated nor scaled
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)  # query heads, then key heads
    inside, first_at, second_at = pairs(HALF, INTERLEAVED, HEAD_DIM, BLOCK)
    dtype = q.dtype.element_ty
    c, s = angles(cos, sin, row, HALF, BLOCK)
    scale = tl.load(q_scale + row) if ROTATED else 1.0
    slot = tl.load(tail_lens + row) - 1 - tl.load(tail_starts + row)
    active = (slot >= 0) & (slot < tail_capacity)
    tail_id = tl.load(tail_ids + row).to(tl.int64)
    wait_for_earlier(PDL)
    heads = qkv + row.to(tl.int64) * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    first = tl.load(heads + head * HEAD_DIM + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + head * HEAD_DIM + second_at, mask=inside, other=0.0).to(tl.float32)
    if NORM != "none":
        if head < NUM_Q_HEADS:
            first, second = _normed(
                first, second, heads, head, q_norm, first_at, second_at, inside, eps, NORM, NUM_Q_HEADS, HEAD_DIM
            )
        else:
            first, second = _normed(
                first, second, heads + NUM_Q_HEADS * HEAD_DIM, head - NUM_Q_HEADS, k_norm, first_at, second_at, inside,
                eps, NORM, NUM_KV_HEADS, HEAD_DIM,
            )  # fmt: skip
    first, second = first * c - second * s, second * c + first * s
    if NORM == "after_rope":
        if head < NUM_Q_HEADS:
            first, second = _weighted(first, second, q_norm, first_at, second_at, inside)
        else:
            first, second = _weighted(first, second, k_norm, first_at, second_at, inside)
    if head < NUM_Q_HEADS:
        at = q + (row.to(tl.int64) * NUM_Q_HEADS + head) * HEAD_DIM
        tl.store(at + first_at, (first * scale).to(dtype), mask=inside)
        tl.store(at + second_at, (second * scale).to(dtype), mask=inside)
    elif active:
        at = tail + ((tail_id * NUM_KV_HEADS + head - NUM_Q_HEADS) * tail_capacity + slot) * 2 * HEAD_DIM
        tl.store(at + first_at, first.to(dtype), mask=inside)
        tl.store(at + second_at, second.to(dtype), mask=inside)
        value = heads + (head + NUM_KV_HEADS) * HEAD_DIM
        v_first = tl.load(value + first_at, mask=inside, other=0.0).to(tl.float32)
        v_second = tl.load(value + second_at, mask=inside, other=0.0).to(tl.float32)
        if V_NORMED:
            v_first, v_second = _normed(
                v_first, v_second, value, 0, v_norm, first_at, second_at, inside, eps, "head", NUM_KV_HEADS, HEAD_DIM
            )
        tl.store(at + HEAD_DIM + first_at, v_first.to(dtype), mask=inside)
        tl.store(at + HEAD_DIM + second_at, v_second.to(dtype), mask=inside)


@triton.jit
def copy_rows_kernel(
    source,  # [num_tails, num_kv_heads, tail_capacity, row_width]: one layer's tails
    tail,  # of the same shape: another layer's tails <- the rows' own K and V
    tail_ids,
    tail_lens,  # 0: append nothing
    tail_starts,
    tail_capacity,
    row_width,
    BLOCK: tl.constexpr,  # at least row_width
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    slot = tl.load(tail_lens + row) - 1 - tl.load(tail_starts + row)
    active = (slot >= 0) & (slot < tail_capacity)
    at = ((tl.load(tail_ids + row).to(tl.int64) * tl.num_programs(1) + head) * tail_capacity + slot) * row_width + i
    wait_for_earlier(PDL)
    if active:
        tl.store(tail + at, tl.load(source + at, mask=i < row_width), mask=i < row_width)


@triton.jit
def predict_query_kernel(
    early,  # [num_rows, NUM_Q_HEADS, HEAD_DIM]: what the next layer would project from this layer's input
    q_norm,  # as in `rotate_append_kernel`
    maps,  # [num_contexts, NUM_Q_HEADS, HEAD_DIM + 1, HEAD_DIM], contexts maps_stride apart; last row: the offset
    cos,  # [num_rows, HALF] float32
    sin,
    q_scale,  # [num_rows] float32
    context_ids,  # [num_rows] int32; a row without a context takes the map of context 0
    q,  # [num_rows, NUM_Q_HEADS, HEAD_DIM] <- [early, 1] @ map, rotated
    maps_stride,
    eps,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,  # False: neither rotated nor scaled
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
    BLOCK_OUT: tl.constexpr,  # pairs of q that a program computes, out of BLOCK
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    inside, first_at, second_at = pairs(HALF, INTERLEAVED, HEAD_DIM, BLOCK)
    of_out = tl.program_id(2) * BLOCK_OUT
    out_inside, first_out, second_out = pairs(HALF, INTERLEAVED, HEAD_DIM, BLOCK_OUT, of_out)
    dtype = q.dtype.element_ty
    c, s = angles(cos, sin, row, HALF, BLOCK_OUT, of_out)
    scale = tl.load(q_scale + row) if ROTATED else 1.0
    context_id = tl.maximum(tl.load(context_ids + row), 0).to(tl.int64)
    matrix = maps + context_id * maps_stride + head * (HEAD_DIM + 1) * HEAD_DIM
    square = inside[:, None] & out_inside[None, :]
    first_rows, second_rows = matrix + first_at[:, None] * HEAD_DIM, matrix + second_at[:, None] * HEAD_DIM
    upper_left = tl.load(first_rows + first_out[None, :], mask=square, other=0.0)
    upper_right = tl.load(first_rows + second_out[None, :], mask=square, other=0.0)
    lower_left = tl.load(second_rows + first_out[None, :], mask=square, other=0.0)
    lower_right = tl.load(second_rows + second_out[None, :], mask=square, other=0.0)
    first = tl.load(matrix + HEAD_DIM * HEAD_DIM + first_out, mask=out_inside, other=0.0).to(tl.float32)
    second = tl.load(matrix + HEAD_DIM * HEAD_DIM + second_out, mask=out_inside, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    heads = early + row.to(tl.int64) * NUM_Q_HEADS * HEAD_DIM
    x_first = tl.load(heads + head * HEAD_DIM + first_at, mask=inside, other=0.0).to(tl.float32)
    x_second = tl.load(heads + head * HEAD_DIM + second_at, mask=inside, other=0.0).to(tl.float32)
    if NORM != "none":
        x_first, x_second = _normed(
            x_first, x_second, heads, head, q_norm, first_at, second_at, inside, eps, NORM, NUM_Q_HEADS, HEAD_DIM
        )
        x_first = x_first.to(dtype).to(tl.float32)
        x_second = x_second.to(dtype).to(tl.float32)
    first += tl.sum(x_first[:, None] * upper_left + x_second[:, None] * lower_left, axis=0)
    second += tl.sum(x_first[:, None] * upper_right + x_second[:, None] * lower_right, axis=0)
    first, second = first * c - second * s, second * c + first * s
    if NORM == "after_rope":
        first, second = _weighted(first, second, q_norm, first_out, second_out, out_inside)
    at = q + (row.to(tl.int64) * NUM_Q_HEADS + head) * HEAD_DIM
    tl.store(at + first_out, (first * scale).to(dtype), mask=out_inside)
    tl.store(at + second_out, (second * scale).to(dtype), mask=out_inside)


@triton.jit
def pairs(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, first=0):
    """Return which of BLOCK pairs of dimensions of a head exist, from pair `first` on, and the two dimensions of each.

    The pairs that RoPE rotates come first, then the other dimensions in arbitrary pairs.
    """
    i = first + tl.arange(0, BLOCK)
    if INTERLEAVED:
        first_at, second_at = 2 * i, 2 * i + 1
    else:
        first_at, second_at = i, i + HALF
    if 2 * HALF < HEAD_DIM:
        first_at = tl.where(i < HALF, first_at, i + HALF)
        second_at = tl.where(i < HALF, second_at, i + HEAD_DIM // 2)
    return i < HEAD_DIM // 2, first_at, second_at


@triton.jit
def angles(cos, sin, row, HALF: tl.constexpr, BLOCK: tl.constexpr, first=0):
    """Return cos and sin of BLOCK pairs: 1 and 0 for pairs that are not rotated."""
    i = first + tl.arange(0, BLOCK)
    c = tl.load(cos + row * HALF + i, mask=i < HALF, other=1.0)
    return c, tl.load(sin + row * HALF + i, mask=i < HALF, other=0.0)


@triton.jit
def _normed(
    first,
    second,
    heads,  # [NUM_HEADS, HEAD_DIM]
    head,
    norm,
    first_at,
    second_at,
    inside,
    eps,
    NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """RMSNorm of one head, or its part of the norm of all heads together. The head is given and returned as the first
    and the second elements of its pairs."""
    if NORM != "projection":
        mean = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / HEAD_DIM
        weights = norm
    else:
        width: tl.constexpr = NUM_HEADS * HEAD_DIM
        all_at = tl.arange(0, triton.next_power_of_2(width))
        x = tl.load(heads + all_at, mask=all_at < width, other=0.0).to(tl.float32)
        mean = tl.sum(x * x, axis=0) / width
        weights = norm + head * HEAD_DIM
    scale = tl.math.rsqrt(mean + eps)
    first, second = first * scale, second * scale
    if NORM != "after_rope":
        first, second = _weighted(first, second, weights, first_at, second_at, inside)
    return first, second


@triton.jit
def _weighted(first, second, weights, first_at, second_at, inside):
    first_weight = tl.load(weights + first_at, mask=inside, other=0.0)
    second_weight = tl.load(weights + second_at, mask=inside, other=0.0)
    return first * first_weight, second * second_weight


@triton.jit
def gate_kernel(x, gates, num, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x *= activation(gates), both of `num` elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier(PDL)
    value = tl.load(x + i, mask=i < num, other=0.0).to(tl.float32)
    gate = tl.load(gates + i, mask=i < num, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate) if ACTIVATION == "sigmoid" else activated(gate, ACTIVATION)
    tl.store(x + i, (value * factor).to(x.dtype.element_ty), mask=i < num)
