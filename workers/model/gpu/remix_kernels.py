"""Kernels that mix several residual streams (hyper-connections): see `csattn.models.streams`.

In the first kernel a program owns some columns of all streams: it mixes them, adds the branch's output, and multiplies
the result by its columns of the matrix, which it has loaded before. In the second, a program owns a row. Sums are taken
in an order that does not depend on the number of rows.
"""

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier
from workers.model.gpu.token_kernels import norm_weights, prepare_row


@triton.jit(do_not_specialize=["num_rows"])
def add_to_streams_kernel(
    hidden,  # [num_rows, hidden_size]: a branch's output; when FIRST, the token's embedding
    post,  # [num_rows, NUM] float32
    comb,  # [num_rows, NUM, NUM] float32
    matrix,  # [num_out, NUM, hidden_size] float32
    streams,  # [num_rows, NUM, hidden_size], written
    products,  # [num_rows, num_parts, num_out] float32 <- partial products, over the program's columns
    sums,  # [num_rows, num_parts] float32 <- partial sums of the squares of all streams
    num_rows,
    num_out,
    hidden_size,
    FIRST: tl.constexpr,  # the first in a step: every stream becomes hidden
    NUM: tl.constexpr,
    BLOCK_NUM: tl.constexpr,  # at least NUM
    BLOCK_OUT: tl.constexpr,  # at least num_out
    BLOCK: tl.constexpr,  # columns of a program
    ROWS: tl.constexpr,  # rows that a program processes one after another
    PDL: tl.constexpr,
):
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1) * ROWS
    c = part * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_NUM)
    out = tl.arange(0, BLOCK_OUT)
    there = j < NUM
    inside = there[:, None] & (c < hidden_size)[None, :]
    at = j[:, None] * hidden_size + c[None, :]
    weight_at = matrix + out[:, None, None] * (NUM * hidden_size) + at[None, :, :]
    weight = tl.load(weight_at, mask=(out < num_out)[:, None, None] & inside[None, :, :], other=0.0)
    wait_for_earlier(PDL)
    for row in range(first, tl.minimum(first + ROWS, num_rows)):
        branch_out = tl.load(hidden + row * hidden_size + c, mask=c < hidden_size, other=0.0).to(tl.float32)
        if FIRST:
            value = tl.where(inside, branch_out[None, :], 0.0)
        else:
            value = tl.load(post + row * NUM + j, mask=there, other=0.0)[:, None] * branch_out[None, :]
            for i in tl.static_range(NUM):
                share = tl.load(comb + (row * NUM + i) * NUM + j, mask=there, other=0.0)
                before = tl.load(streams + (row * NUM + i) * hidden_size + c, mask=c < hidden_size, other=0.0)
                value += share[:, None] * before.to(tl.float32)[None, :]
            tl.debug_barrier()  # all threads of the program have loaded the old values, which are overwritten now
        dtype = streams.dtype.element_ty
        tl.store(streams + row * NUM * hidden_size + at, value.to(dtype), mask=inside)
        value = value.to(dtype).to(tl.float32)
        product = tl.sum(tl.sum(weight * value[None, :, :], axis=1), axis=1)
        tl.store(products + (row * num_parts + part) * num_out + out, product, mask=out < num_out)
        tl.store(sums + row * num_parts + part, tl.sum(tl.sum(value * value, axis=1), axis=0))


@triton.jit
def read_streams_kernel(
    streams,  # [num_rows, NUM, hidden_size]
    products,  # [num_rows, num_parts, num_out] float32
    sums,  # [num_rows, num_parts] float32
    biases,  # [num_out] float32
    scales,  # [3] float32; JOINS: [1]
    post,  # [num_rows, NUM] float32, written
    comb,  # [num_rows, NUM, NUM] float32, written
    hidden,  # [num_rows, hidden_size] <- 0; JOINS: the mixture of streams
    norm,  # this and the next parameters: as in `begin_kernel`, for the mixture
    scaled,
    norm_ahead,
    scaled_ahead,
    squares,
    num_squares,
    num_parts,
    num_out,
    hidden_size,
    eps,
    least,  # added to weights and their sums to keep them from 0
    iterations,
    JOINS: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK_NUM: tl.constexpr,  # at least NUM
    BLOCK_PARTS: tl.constexpr,  # at least num_parts
    HAS_NORM: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,  # at least hidden_size
    SQUARES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_NUM)
    p = tl.arange(0, BLOCK_PARTS)
    inside, there = c < hidden_size, j < NUM
    weight, ahead = norm_weights(norm, norm_ahead, 0, hidden_size, HAS_NORM, AHEAD, BLOCK)
    wait_for_earlier(PDL)
    total = tl.sum(tl.load(sums + row * num_parts + p, mask=p < num_parts, other=0.0), axis=0)
    inverse = tl.math.rsqrt(total / (NUM * hidden_size) + eps)
    own = products + row * num_parts * num_out
    pre = tl.sigmoid(_weights(own, j, there, p, num_parts, num_out, inverse, biases, scales, BLOCK_PARTS)) + least
    value = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(NUM):
        share = tl.sum(tl.where(j == i, pre, 0.0), axis=0)
        stream = tl.load(streams + (row * NUM + i) * hidden_size + c, mask=inside, other=0.0)
        value += share * stream.to(tl.float32)
    kept = value if JOINS else tl.zeros((BLOCK,), tl.float32)
    tl.store(hidden + row * hidden_size + c, kept.to(hidden.dtype.element_ty), mask=inside)
    prepare_row(
        value, row, 0, weight, ahead, scaled, scaled_ahead, squares, num_squares, hidden_size,
        AHEAD, BLOCK, SQUARES_BLOCK,
    )  # fmt: skip
    if not JOINS:
        added = _weights(own, NUM + j, there, p, num_parts, num_out, inverse, biases, scales + 1, BLOCK_PARTS)
        tl.store(post + row * NUM + j, 2.0 * tl.sigmoid(added), mask=there)
        pair = tl.reshape(j[:, None] * NUM + j[None, :], (BLOCK_NUM * BLOCK_NUM,))
        is_pair = there[:, None] & there[None, :]
        flat = tl.reshape(is_pair, (BLOCK_NUM * BLOCK_NUM,))
        mixed = _weights(own, 2 * NUM + pair, flat, p, num_parts, num_out, inverse, biases, scales + 2, BLOCK_PARTS)
        share = _balanced(tl.reshape(mixed, (BLOCK_NUM, BLOCK_NUM)), there, is_pair, least, iterations)
        tl.store(comb + row * NUM * NUM + j[:, None] * NUM + j[None, :], share, mask=is_pair)


@triton.jit
def _weights(own, out, there, p, num_parts, num_out, inverse, biases, scale, BLOCK_PARTS: tl.constexpr):
    """Return outputs `out` of a row: its partial products summed over all parts, normed and scaled, plus biases."""
    at = own + p[:, None] * num_out + out[None, :]
    product = tl.sum(tl.load(at, mask=(p < num_parts)[:, None] & there[None, :], other=0.0), axis=0)
    return product * (inverse * tl.load(scale)) + tl.load(biases + out, mask=there, other=0.0)


@triton.jit
def _balanced(logits, there, is_pair, least, iterations):
    """Return the softmax of the rows, with columns and rows then divided by their sums in turn (Sinkhorn); 0 outside
    is_pair."""
    logits = tl.where(there[None, :], logits, -1e38)
    largest = tl.max(tl.where(logits == logits, logits, -1e38), axis=1)  # finite even for a row of NaN
    power = tl.exp(logits - largest[:, None])
    share = tl.where(is_pair, power / tl.sum(power, axis=1)[:, None] + least, 0.0)
    share = tl.where(is_pair, share / (tl.sum(share, axis=0)[None, :] + least), 0.0)
    for _ in range(iterations - 1):
        share = tl.where(is_pair, share / (tl.sum(share, axis=1)[:, None] + least), 0.0)
        share = tl.where(is_pair, share / (tl.sum(share, axis=0)[None, :] + least), 0.0)
    return share
