"""Products of a few rows with a weight matrix, bound by the bandwidth at which the weights are read.

Weights have 16 or 32 bits, or 8 or 4, which are decoded in registers (`quantized_kernels`; for few rows see
`quantized_ops`). A program owns BLOCK_N rows of the weights (and, with split-K, a part of their columns) and streams
them once through the tensor cores; the step's rows are the narrow side of the product. Everything that follows a
product in a transformer layer is fused into its epilogue. The epilogue's other operands are loaded before the weights,
so that it does not wait for memory. Sums are taken in an order that does not depend on the device.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.model.gpu.exchange_kernels import sum_over_devices
from workers.model.gpu.quantized_kernels import quantized_product


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,  # [num_rows, num_k]; NORMED: hidden * norm weight, not yet divided by the row's root mean square
    squares,  # [num_squares, num_rows] float32: parts of the sum of hidden² of each row, or x when not NORMED
    w,  # [num_out (* 2 when GATED: gates, then ups), num_k], or a `QuantizedWeight`'s words, by FORMAT
    scales,  # a `QuantizedWeight`'s, or w
    bias,  # [num_out (* 2 when GATED)], or w when not HAS_BIAS
    out,  # [num_rows, num_out]
    partials,  # scratch memory of split-K sums, float32
    counters,  # [tiles] int32: programs that have written their part of a tile's sum; 0 between kernels
    num_rows,
    num_out,
    num_k,
    w_len,  # stride of the rows of w
    scales_len,  # stride from a group's scales to the next group's
    num_squares,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,  # out = activation(gate) * up
    ACTIVATION: tl.constexpr,  # "none", or as in `csattn.models.spec`
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr,  # "plain", or a format of `QuantizedWeight`
    GROUP: tl.constexpr,  # this and the next three: as in `quantized_product`
    ZEROS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    row = _weight_rows(tile, num_out, GATED, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    s = tl.arange(0, BLOCK_SQUARES)
    seen = (s < num_squares)[:, None] & (m < num_rows)[None, :]
    biases = tl.load(bias + row).to(tl.float32) if HAS_BIAS else 0.0
    if PDL:
        gdc_wait()
    parts = tl.load(squares + s[:, None] * num_rows + m[None, :], mask=seen, other=0.0) if NORMED else 0.0
    if NORMED and BLOCK_M > 16:  # unsummed, they would occupy too many registers until the epilogue
        parts = tl.sum(parts, axis=0)[None, :]
    acc, complete = _stream(
        x, w, scales, partials, counters, row, num_rows, num_k, w_len, scales_len, tile,
        BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, EVEN_K, FORMAT, GROUP, ZEROS, NATIVE, PDL, DOT_PRECISION,
    )  # fmt: skip
    if complete:
        if NORMED:
            scale = tl.math.rsqrt(tl.sum(parts, axis=0) / num_k + eps)
            acc = acc * scale[None, :]
        if HAS_BIAS:
            acc += biases[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
            value = gated_by(gate, up, ACTIVATION)
            n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            value = activated(acc, ACTIVATION)
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (n < num_out)[:, None] & (m < num_rows)[None, :]
        tl.store(out + m[None, :] * num_out + n[:, None], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_by(gate, up, ACTIVATION: tl.constexpr):
    ALL: tl.constexpr = tl.PropagateNan.ALL  # NaN stays NaN
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, 7.0, propagate_nan=ALL)
        return activated(gate, "quick_gelu") * (tl.clamp(up, -7.0, 7.0, propagate_nan=ALL) + 1.0)
    elif ACTIVATION == "limited":
        gate = tl.minimum(gate, 10.0, propagate_nan=ALL)
        return activated(gate, "silu") * tl.clamp(up, -10.0, 10.0, propagate_nan=ALL)
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == "none")
        return x


@triton.jit(do_not_specialize=["num_rows"])
def linear_add_kernel(
    x,  # [num_rows, num_k]
    w,  # [num_out, num_k], or a `QuantizedWeight`'s words, by FORMAT
    scales,  # a `QuantizedWeight`'s, or w
    bias,  # [num_out], or w when not HAS_BIAS
    hidden,  # [num_rows, num_out]: the product times multiplier is added to it
    norm,  # [num_out] float32: weight of the norm that reads hidden next, or anything when not HAS_NORM
    scaled,  # [num_rows, num_out] <- hidden * norm
    norm_ahead,  # [num_out] float32: weight of the norm of the layer after, or anything when not AHEAD
    scaled_ahead,  # [num_rows, num_out] <- hidden * norm_ahead when AHEAD
    squares,  # [num_squares, num_rows] float32 <- sums of hidden² over blocks of a tile's columns
    partials,  # this and counters: as in `linear_kernel`
    counters,
    num_rows,
    num_out,
    num_k,
    w_len,  # stride of the rows of w
    scales_len,  # stride from a group's scales to the next group's
    multiplier,
    counts,  # this and inboxes: of an `Exchange` of tiles, or anything where there is one device
    inboxes,
    RANK: tl.constexpr,
    NUM_DEVICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    AHEAD: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr,  # "plain", or a format of `QuantizedWeight`
    GROUP: tl.constexpr,  # this and the next three: as in `quantized_product`
    ZEROS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    row = _weight_rows(tile, num_out, False, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < num_out)[:, None] & (m < num_rows)[None, :]
    at = m[None, :] * num_out + n[:, None]
    ones = tl.full((BLOCK_N,), 1.0, tl.float32)
    weight = tl.load(norm + n, mask=n < num_out, other=0.0) if HAS_NORM else ones
    weight_ahead = tl.load(norm_ahead + n, mask=n < num_out, other=0.0) if AHEAD else ones
    biases = tl.load(bias + row).to(tl.float32) if HAS_BIAS else 0.0
    if PDL:
        gdc_wait()
    count = tl.load(counts + tile) if NUM_DEVICES > 1 else 0
    before = tl.load(hidden + at, mask=inside, other=0.0)
    acc, complete = _stream(
        x, w, scales, partials, counters, row, num_rows, num_k, w_len, scales_len, tile,
        BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, EVEN_K, FORMAT, GROUP, ZEROS, NATIVE, PDL, DOT_PRECISION,
    )  # fmt: skip
    if complete:
        dtype = hidden.dtype.element_ty
        if HAS_BIAS:
            acc += biases[:, None]
        if NUM_DEVICES > 1:
            num_numbers = num_rows * num_out
            acc = sum_over_devices(acc, at, inside, tile, count, counts, inboxes, num_numbers, RANK, NUM_DEVICES)
        value = (before.to(tl.float32) + multiplier * acc).to(dtype).to(tl.float32)
        tl.store(hidden + at, value.to(dtype), mask=inside)
        tl.store(scaled + at, (value * weight[:, None]).to(dtype), mask=inside)
        if AHEAD:
            tl.store(scaled_ahead + at, (value * weight_ahead[:, None]).to(dtype), mask=inside)
        value = tl.where(inside, value, 0.0)
        PARTS: tl.constexpr = BLOCK_N // SQUARES_BLOCK
        parts = tl.sum(tl.reshape(value * value, (PARTS, SQUARES_BLOCK, BLOCK_M)), axis=1)
        part = tile * PARTS + tl.arange(0, PARTS)
        there = (part * SQUARES_BLOCK < num_out)[:, None] & (m < num_rows)[None, :]
        tl.store(squares + part[:, None] * num_rows + m[None, :], parts, mask=there)


@triton.jit
def _weight_rows(tile, num_out, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of the weights that a tile multiplies; past the end the last repeats. Gates and ups alternate."""
    r = tl.arange(0, BLOCK_N)
    if GATED:
        return tl.minimum(tile * (BLOCK_N // 2) + r // 2, num_out - 1) + (r % 2) * num_out
    else:
        return tl.minimum(tile * BLOCK_N + r, num_out - 1)


@triton.jit
def _stream(
    x, w, scales, partials, counters, row, num_rows, num_k, w_len, scales_len, tile,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, NATIVE: tl.constexpr,
    PDL: tl.constexpr, DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return w[row] @ x.T, [BLOCK_N, BLOCK_M] float32, and whether it is complete: with split-K, only the program that
    arrives last has the whole sum."""
    part = tl.program_id(1)
    part_len = tl.cdiv(tl.cdiv(num_k, BLOCK_K), SPLIT_K) * BLOCK_K
    start = part * part_len
    stop = tl.minimum(start + part_len, num_k)
    m = tl.arange(0, BLOCK_M)
    w_rows, x_rows = w + row.to(tl.int64)[:, None] * w_len, x + m[None, :] * num_k
    if FORMAT == "plain":
        k = start + tl.arange(0, BLOCK_K)
        w_at, x_at = w_rows + k[None, :], x_rows + k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for at in range(start, stop, BLOCK_K):
            if EVEN_K:
                w_tile = tl.load(w_at, eviction_policy="evict_first")
                x_tile = tl.load(x_at, mask=(m < num_rows)[None, :], other=0.0)
            else:
                inside = at + tl.arange(0, BLOCK_K) < stop
                w_tile = tl.load(w_at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                x_tile = tl.load(x_at, mask=(m < num_rows)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w_tile, x_tile, acc, input_precision=DOT_PRECISION)
            w_at += BLOCK_K
            x_at += BLOCK_K
    else:
        acc = quantized_product(
            w_rows, x_rows, scales + row, m < num_rows, scales_len, start, stop,
            BLOCK_M, BLOCK_N, EVEN_K, FORMAT, GROUP, ZEROS, NATIVE, DOT_PRECISION,
        )  # fmt: skip
    if PDL:  # only now: an earlier dependent would take bandwidth and room from programs that still stream weights
        gdc_launch_dependents()
    complete = True
    if SPLIT_K > 1:
        r = tl.arange(0, BLOCK_N)
        sum_at = partials + (tile * SPLIT_K * BLOCK_N + r)[:, None] * BLOCK_M + m[None, :]
        tl.store(sum_at + part * BLOCK_N * BLOCK_M, acc)
        tl.debug_barrier()  # all of the program's sums are written before one of its threads counts its arrival
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        complete = arrived == SPLIT_K - 1
        if complete:
            tl.store(counters + tile, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for other in range(SPLIT_K):  # in the order of the parts, whichever program arrived last
                acc += tl.load(sum_at + other * BLOCK_N * BLOCK_M, cache_modifier=".cg")
    return acc, complete
