"""MoE kernels: routing, and experts' products, in which an expert's weights are read once for up to BLOCK_M rows."""

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier
from workers.model.gpu.linear_kernels import activated, gated_by


@triton.jit
def choose_kernel(
    logits,  # [num_rows, num_experts] float32
    bias,  # [num_experts] float32, or logits when not HAS_BIAS
    scales,  # [num_experts] float32: factors of shares, or logits when not HAS_SCALES
    by_token,  # [vocab_size, NUM_CHOSEN] int32: each token's experts, or chosen when not BY_TOKEN
    token_ids,  # [num_rows] int64
    chosen,  # [num_rows, NUM_CHOSEN] int32 <-
    shares,  # [num_rows, NUM_CHOSEN] float32 <-
    num_experts,
    scale,
    SCORES: tl.constexpr,  # as in `ExpertsSpec`
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMED: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_experts
    BLOCK_CHOSEN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    inside = e < num_experts
    offsets = tl.load(bias + e, mask=inside, other=0.0) if HAS_BIAS else 0.0
    of_token = 0
    if BY_TOKEN:
        c = tl.arange(0, BLOCK_CHOSEN)
        of_token = tl.load(by_token + tl.load(token_ids + row) * NUM_CHOSEN + c, mask=c < NUM_CHOSEN, other=0)
    wait_for_earlier(PDL)
    least = float("-inf")
    x = tl.load(logits + row * num_experts + e, mask=inside, other=least)
    if SCORES == "softmax":
        powers = tl.exp(x - tl.max(x, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    elif SCORES == "sigmoid":
        scores = tl.sigmoid(x)
    elif SCORES == "root_softplus":
        scores = tl.sqrt(tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x))))
    else:
        tl.static_assert(SCORES == "softmax_of_chosen")
        scores = x
    ranked = tl.where(inside, scores + offsets, least)
    if NUM_GROUPS > 1:
        group = e // (num_experts // NUM_GROUPS)
        group_scores = tl.full((BLOCK,), least, tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            of_group = tl.where(group == g, ranked, least)
            best = tl.max(of_group, axis=0)
            at = _first(of_group == best, e, num_experts)
            group_scores = tl.where(group == g, best + tl.max(tl.where(e == at, least, of_group), axis=0), group_scores)
        kept = e < 0
        for _ in tl.static_range(NUM_KEPT):
            left = tl.where(kept, least, group_scores)
            at = _first((left == tl.max(left, axis=0)) & (kept == 0), e, num_experts)
            kept = kept | (group == at // (num_experts // NUM_GROUPS))
        ranked = tl.where(kept, ranked, least)
    k = tl.arange(0, BLOCK_CHOSEN)
    of_chosen = tl.full((BLOCK_CHOSEN,), least, tl.float32)
    factors = tl.full((BLOCK_CHOSEN,), 1.0, tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        if BY_TOKEN:
            at = tl.sum(tl.where(k == i, of_token, 0), axis=0)
        else:
            at = _first(ranked == tl.max(ranked, axis=0), e, num_experts)
        of_chosen = tl.where(k == i, tl.max(tl.where(e == at, scores, least), axis=0), of_chosen)
        if HAS_SCALES:
            factors = tl.where(k == i, tl.load(scales + at), factors)
        tl.store(chosen + row * NUM_CHOSEN + i, at)
        ranked = tl.where(e == at, least, ranked)
    is_one = k < NUM_CHOSEN
    if SCORES == "softmax_of_chosen":
        powers = tl.exp(of_chosen - tl.max(of_chosen, axis=0))
        of_chosen = powers / tl.sum(powers, axis=0)
    if NORMED:
        of_chosen = of_chosen / (tl.sum(tl.where(is_one, of_chosen, 0.0), axis=0) + LEAST_SUM)
    tl.store(shares + row * NUM_CHOSEN + k, of_chosen * scale * factors, mask=is_one)


@triton.jit
def _log1p(x):
    """log(1 + x) for x from 0 to 1, accurate also for tiny x: 2 * atanh(x / (2 + x))."""
    s = x / (2.0 + x)
    square = s * s
    total = tl.full(x.shape, 1.0 / 15.0, tl.float32)
    for odd in tl.static_range(13, 0, -2):
        total = total * square + 1.0 / odd
    return 2.0 * s * total


@triton.jit
def _first(is_it, e, num_experts):
    """Return the first expert for which is_it is true; the last expert if it is true for none (NaN)."""
    return tl.min(tl.where(is_it, e, num_experts - 1), axis=0)


@triton.jit
def sum_parts_kernel(
    parts,  # [num_rows, NUM_PARTS, hidden_size]
    out,  # [num_rows, hidden_size] <- their sums, added to what is there if ADDS
    hidden_size,
    NUM_PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least hidden_size
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < hidden_size
    wait_for_earlier(PDL)
    value = tl.zeros((BLOCK,), tl.float32)
    if ADDS:
        value = tl.load(out + row * hidden_size + i, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(NUM_PARTS):
        value += tl.load(parts + (row * NUM_PARTS + part) * hidden_size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden_size + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def experts_kernel(
    x,  # [num_rows, num_k], or [num_rows, NUM_CHOSEN, num_k] when BY_PAIR; NORMED: as in `linear_kernel`
    squares,  # as in `linear_kernel`
    w,  # [num_experts, num_out, num_k]; when GATED [num_experts, 2 * num_out, num_k]: gates, then ups
    bias,  # [num_experts, num_out (* 2 when GATED)], or w when not HAS_BIAS
    chosen,  # [num_rows, NUM_CHOSEN] int32
    shares,  # [num_rows, NUM_CHOSEN] float32: factors, by SHARES
    out,  # [num_rows, NUM_CHOSEN, num_out] <- activation(gate) * up, or activation(product)
    num_rows,
    num_out,
    num_k,
    num_squares,
    eps,
    NORMED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    SHARES: tl.constexpr,  # "none", or of what the shares are factors: "input" or "output"
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # at least num_rows * NUM_CHOSEN
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.program_id(1)
    num_parts: tl.constexpr = 2 if GATED else 1
    r = tl.arange(0, BLOCK_N)  # gates and ups alternate
    weight_row = tl.minimum(tile * (BLOCK_N // num_parts) + r // num_parts, num_out - 1) + (r % num_parts) * num_out
    weight_row = expert.to(tl.int64) * num_parts * num_out + weight_row
    biases = tl.load(bias + weight_row).to(tl.float32) if HAS_BIAS else 0.0
    wait_for_earlier(PDL)
    n = tile * (BLOCK_N // num_parts) + tl.arange(0, BLOCK_N // num_parts)
    is_chosen, rank, count = _pairs_of(chosen, expert, num_rows * NUM_CHOSEN, BLOCK_PAIRS)
    for first in range(0, count, BLOCK_M):
        pair, there = _some_pairs(is_chosen, rank, count, first, BLOCK_PAIRS, BLOCK_M)
        row = pair // NUM_CHOSEN
        w_at, x_at = w + weight_row[:, None] * num_k, x + (pair if BY_PAIR else row)[None, :] * num_k
        acc = _product(w_at, x_at, there, num_k, BLOCK_M, BLOCK_N, BLOCK_K, DOT_PRECISION)
        if NORMED:
            s = tl.arange(0, BLOCK_SQUARES)
            seen = (s < num_squares)[:, None] & there[None, :]
            parts = tl.load(squares + s[:, None] * num_rows + row[None, :], mask=seen, other=0.0)
            acc = acc * tl.math.rsqrt(tl.sum(parts, axis=0) / num_k + eps)[None, :]
        share = tl.load(shares + pair, mask=there, other=0.0)[None, :] if SHARES != "none" else 1.0
        if SHARES == "input":
            acc = acc * share
        if HAS_BIAS:
            acc += biases[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
            value = gated_by(gate, up, ACTIVATION)
        else:
            value = activated(acc, ACTIVATION)
        if SHARES == "output":
            value = value * share
        inside = (n < num_out)[:, None] & there[None, :]
        tl.store(out + pair[None, :] * num_out + n[:, None], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pairs_of(chosen, expert, num_pairs, BLOCK_PAIRS: tl.constexpr):
    """Return which (row, choice) pairs chose the expert, the rank of each among these (a prefix sum), and the count."""
    p = tl.arange(0, BLOCK_PAIRS)
    is_chosen = (tl.load(chosen + p, mask=p < num_pairs, other=-1) == expert).to(tl.int32)
    return is_chosen, tl.cumsum(is_chosen, axis=0) - 1, tl.sum(is_chosen, axis=0)


@triton.jit
def _some_pairs(is_chosen, rank, count, first, BLOCK_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return BLOCK_M of an expert's pairs, those of rank `first` and up, and a mask of those that exist."""
    m = first + tl.arange(0, BLOCK_M)
    p = tl.arange(0, BLOCK_PAIRS)
    is_it = (rank[:, None] == m[None, :]) & (is_chosen[:, None] > 0)
    return tl.sum(tl.where(is_it, p[:, None], 0), axis=0), m < count


@triton.jit
def _product(
    w_at, x_at, there, num_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return w @ x.T, [BLOCK_N, BLOCK_M] float32. w_at: [BLOCK_N, 1] pointers to rows, x_at: [1, BLOCK_M]; there: which
    rows of x exist."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(0, num_k, BLOCK_K):
        inside = at + k < num_k
        w_tile = tl.load(w_at + (at + k)[None, :], mask=inside[None, :], other=0.0)
        x_tile = tl.load(x_at + (at + k)[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc, input_precision=DOT_PRECISION)
    return acc
