"""Kernels for layers of latents (MLA), each row by itself: see `csattn.models.latent`."""

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier
from workers.model.gpu.head_kernels import angles, pairs


@triton.jit
def append_latents_kernel(
    inputs,  # [num_rows, in_width]: queries or their latents, the row's key, its index key, the index heads' weights
    q_norm,  # [Q_RANK] float32
    kv_norm,  # [KV_RANK] float32
    index_norm,  # [2, INDEX_DIM] float32: weights and biases
    cos,  # [num_rows, HALF] float32
    sin,
    tail_ids,
    tail_lens,  # 0: append nothing
    tail,  # [num_tails, tail_capacity, width]
    q_latents,  # [num_rows, Q_RANK] <- norm(the queries' latents)
    in_width,
    tail_capacity,
    width,
    eps,
    Q_RANK: tl.constexpr,  # 0: queries have no latents
    KEY_AT: tl.constexpr,  # where the row's key begins in inputs
    KV_RANK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_DIM: tl.constexpr,  # 0: there is no index key
    INDEX_INTERLEAVED: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # at least Q_RANK
    BLOCK_KV: tl.constexpr,  # at least KV_RANK
    BLOCK_HALF: tl.constexpr,  # at least HALF
    BLOCK_INDEX: tl.constexpr,  # at least INDEX_DIM
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(tail_lens + row) - 1
    active = (slot >= 0) & (slot < tail_capacity)
    tail_row = tail + (tl.load(tail_ids + row).to(tl.int64) * tail_capacity + slot) * width
    wait_for_earlier(PDL)
    x = inputs + row * in_width
    if Q_RANK:
        of_q = tl.arange(0, BLOCK_Q)
        latent = _rms_normed(x, q_norm, of_q, Q_RANK, eps)
        tl.store(q_latents + row * Q_RANK + of_q, latent.to(q_latents.dtype.element_ty), mask=of_q < Q_RANK)
    if active:
        dtype = tail.dtype.element_ty
        c, s = angles(cos, sin, row, HALF, BLOCK_HALF)
        x += KEY_AT
        of_kv = tl.arange(0, BLOCK_KV)
        tl.store(tail_row + of_kv, _rms_normed(x, kv_norm, of_kv, KV_RANK, eps).to(dtype), mask=of_kv < KV_RANK)
        x += KV_RANK
        tail_row += KV_RANK
        _store_rotated(x, tail_row, c, s, HALF, INTERLEAVED, BLOCK_HALF)
        if INDEX_DIM:
            x += 2 * HALF
            tail_row += 2 * HALF
            i = tl.arange(0, BLOCK_INDEX)
            key = tl.load(x + i, mask=i < INDEX_DIM, other=0.0).to(tl.float32)
            mean = tl.sum(key, axis=0) / INDEX_DIM
            key = tl.where(i < INDEX_DIM, key - mean, 0.0)
            scale = tl.math.rsqrt(tl.sum(key * key, axis=0) / INDEX_DIM + eps)
            weight = tl.load(index_norm + i, mask=i < INDEX_DIM, other=0.0)
            bias = tl.load(index_norm + INDEX_DIM + i, mask=i < INDEX_DIM, other=0.0)
            stays = (i >= 2 * HALF) & (i < INDEX_DIM)
            tl.store(tail_row + i, (key * scale * weight + bias).to(dtype), mask=stays)
            is_pair, first_at, second_at = pairs(HALF, INDEX_INTERLEAVED, 2 * HALF, BLOCK_HALF)
            first = _layer_normed(x, index_norm, first_at, is_pair, mean, scale, INDEX_DIM)
            second = _layer_normed(x, index_norm, second_at, is_pair, mean, scale, INDEX_DIM)
            tl.store(tail_row + first_at, (first * c - second * s).to(dtype), mask=is_pair)
            tl.store(tail_row + second_at, (second * c + first * s).to(dtype), mask=is_pair)


@triton.jit
def make_latent_queries_kernel(
    inputs,  # [num_rows, in_width]: the weights of the index heads come last
    projected,  # [num_rows, projected_width]: all heads' queries, then those of the index heads
    cos,  # [num_rows, HALF] float32
    sin,
    q_scale,  # [num_rows] float32: a factor of the queries, not of index heads'
    # [num_rows, NUM_HEADS, KV_RANK + 2 * HALF] <- the rotated part; `heads_product_kernel` writes the first KV_RANK
    q,
    index_q,  # [num_rows, NUM_INDEX_HEADS, INDEX_DIM] <- rotated
    index_weights,  # [num_rows, NUM_INDEX_HEADS] float32 <-
    in_width,
    projected_width,
    weight_scale,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    KV_RANK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NUM_INDEX_HEADS: tl.constexpr,  # 0: none
    INDEX_DIM: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # at least HALF
    BLOCK_INDEX: tl.constexpr,  # at least INDEX_DIM
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # the attention's heads, then the indexer's
    c, s = angles(cos, sin, row, HALF, BLOCK_HALF)
    wait_for_earlier(PDL)
    x = projected + row * projected_width
    if head < NUM_HEADS:
        out = q + (row * NUM_HEADS + head) * (KV_RANK + 2 * HALF) + KV_RANK
        x += head * (NOPE_DIM + 2 * HALF) + NOPE_DIM
        scale = tl.load(q_scale + row)
        _store_rotated(x, out, c * scale, s * scale, HALF, INTERLEAVED, BLOCK_HALF)
    elif NUM_INDEX_HEADS:
        head -= NUM_HEADS
        of_head = row * NUM_INDEX_HEADS + head
        counts = tl.load(inputs + row * in_width + in_width - NUM_INDEX_HEADS + head).to(tl.float32)
        tl.store(index_weights + of_head, counts * weight_scale)
        out = index_q + of_head * INDEX_DIM
        x += NUM_HEADS * (NOPE_DIM + 2 * HALF) + head * INDEX_DIM
        i = tl.arange(0, BLOCK_INDEX)
        stays = (i >= 2 * HALF) & (i < INDEX_DIM)
        tl.store(out + i, tl.load(x + i, mask=stays, other=0.0).to(index_q.dtype.element_ty), mask=stays)
        _store_rotated(x, out, c, s, HALF, INDEX_INTERLEAVED, BLOCK_HALF)


@triton.jit(do_not_specialize=["num_rows"])
def heads_product_kernel(
    x,  # [num_rows, num_heads, num_in], the last dimension contiguous
    ups,  # [num_heads, num_in, num_out]
    scales,  # [num_rows] float32, or anything when not SCALED
    out,  # [num_rows, num_heads, num_out] <- scales * x @ ups for each head, the last dimension contiguous
    num_rows,
    num_in,
    num_out,
    x_row,  # this and the next six: strides in elements
    x_head,
    ups_head,
    ups_in,
    ups_out,
    out_row,
    out_head,
    SCALED: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least num_rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_earlier(PDL)
    x += head * x_head
    ups += head * ups_head
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_in = k < num_in
        a = tl.load(x + row[:, None] * x_row + k[None, :], mask=(row < num_rows)[:, None] & is_in[None, :], other=0.0)
        places = ups + k[:, None] * ups_in + n[None, :] * ups_out
        b = tl.load(places, mask=is_in[:, None] & (n < num_out)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=DOT_PRECISION)
    if SCALED:
        sums *= tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
    places = out + row[:, None] * out_row + head * out_head + n[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (n < num_out)[None, :])


@triton.jit
def _rms_normed(x, norm, i, SIZE: tl.constexpr, eps):
    """Return RMSNorm of SIZE elements, float32."""
    value = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    return value * scale * tl.load(norm + i, mask=i < SIZE, other=0.0)


@triton.jit
def _layer_normed(x, norm, at, is_there, mean, scale, SIZE: tl.constexpr):
    """Return elements `at` of a LayerNorm with this mean and scale, float32."""
    value = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    weight, bias = tl.load(norm + at, mask=is_there, other=0.0), tl.load(norm + SIZE + at, mask=is_there, other=0.0)
    return (value - mean) * scale * weight + bias


@triton.jit
def _store_rotated(x, out, c, s, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Write 2 * HALF elements of x to out, rotated. c, s: cosines and sines of the angles."""
    is_pair, first_at, second_at = pairs(HALF, INTERLEAVED, 2 * HALF, BLOCK)
    first = tl.load(x + first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(x + second_at, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(out + first_at, (first * c - second * s).to(out.dtype.element_ty), mask=is_pair)
    tl.store(out + second_at, (second * c + first * s).to(out.dtype.element_ty), mask=is_pair)
