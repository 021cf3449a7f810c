"""Kernels for the rows of compressed attention, each row by itself: see `csattn.models.compressed`.

Channels 2i and 2i + 1 are a pair; RoPE rotates the last HALF pairs. A row has one program, or several.
"""

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    inputs,  # [num_rows, in_width]: the row itself, then what it adds to compressed rows
    norm,  # [DIM] float32
    cos,  # [num_rows, HALF] float32, of the row's position
    sin,
    own,  # [num_rows] int64: the row's place in rows
    slots,  # [num_rows] int64
    positions,  # [num_rows] int64
    rows,  # [places, DIM] <- norm(row), rotated
    pending,  # [slots, num_pending, width] float32: a ring buffer by position <- what the row adds
    in_width,
    num_pending,
    width,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # at least DIM // 2
    BLOCK: tl.constexpr,  # elements of pending that a program writes; a row's first program writes the row instead
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = inputs + row * in_width
    if part == 0:
        first, second, p = _pairs(x, DIM, BLOCK_PAIRS)
        first, second = _normed(first, second, norm, p, DIM, eps)
        _store_rotated(rows + tl.load(own + row) * DIM, first, second, cos, sin, row, p, 1.0, DIM, HALF)
    else:
        i = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(slots + row) * num_pending + tl.load(positions + row) % num_pending
        value = tl.load(x + DIM + i, mask=i < width, other=0.0).to(tl.float32)
        tl.store(pending + at * width + i, value, mask=i < width)


@triton.jit
def compress_kernel(
    pending,  # [slots, num_pending, width] float32
    position_bias,  # [RATIO, SERIES * DIM] float32
    norm,  # [DIM] float32
    cos,  # [num_rows, HALF] float32, of the position of the compressed row's first token
    sin,
    slots,  # [num_rows] int64
    positions,  # [num_rows] int64
    written,  # [num_rows] int64: the place of the compressed row that this row completes; `nowhere`: it completes none
    out,  # [places, DIM] <- completed compressed rows
    num_pending,
    width,
    kv_at,  # where the token's values lie in what it adds; their gates (logits of weights) follow
    nowhere,
    eps,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # at least DIM // 2
    TOKENS: tl.constexpr,  # loaded at a time
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(written + row)
    if place != nowhere:
        p, span = tl.arange(0, BLOCK_PAIRS), RATIO * SERIES
        inside = (p < DIM // 2)[None, :]
        most_a, most_b = (
            tl.full([BLOCK_PAIRS], -float("inf"), tl.float32),
            tl.full([BLOCK_PAIRS], -float("inf"), tl.float32),
        )
        total_a, total_b = tl.zeros([BLOCK_PAIRS], tl.float32), tl.zeros([BLOCK_PAIRS], tl.float32)
        sum_a, sum_b = tl.zeros([BLOCK_PAIRS], tl.float32), tl.zeros([BLOCK_PAIRS], tl.float32)
        last, slot = tl.load(positions + row), tl.load(slots + row)
        for start in range(0, span, TOKENS):
            t = start + tl.arange(0, TOKENS)
            position = last - span + 1 + t
            is_there = (t < span) & (position >= 0)
            series = (t // RATIO) * DIM  # with two series, earlier tokens add their first DIM channels
            token = (
                pending + (slot * num_pending + tl.where(is_there, position, 0) % num_pending) * width + kv_at + series
            )
            of_bias = position_bias + (t % RATIO) * (SERIES * DIM) + series
            mask = is_there[:, None] & inside
            most_a, total_a, sum_a = _add_tokens(token, of_bias, 2 * p, mask, most_a, total_a, sum_a, SERIES * DIM)
            most_b, total_b, sum_b = _add_tokens(token, of_bias, 2 * p + 1, mask, most_b, total_b, sum_b, SERIES * DIM)
        first = tl.where(p < DIM // 2, sum_a / total_a, 0.0)
        second = tl.where(p < DIM // 2, sum_b / total_b, 0.0)
        first, second = _normed(first, second, norm, p, DIM, eps)
        _store_rotated(out + place * DIM, first, second, cos, sin, row, p, 1.0, DIM, HALF)


@triton.jit
def make_queries_kernel(
    projected,  # [num_rows, projected_width]: all heads' queries, then those of the index heads
    inputs,  # [num_rows, in_width]: the weights of the index heads come last
    cos,  # [num_rows, HALF] float32
    sin,
    q,  # [num_rows, NUM_HEADS, DIM] <-
    index_q,  # [num_rows, NUM_INDEX_HEADS, INDEX_DIM] <-
    index_weights,  # [num_rows, NUM_INDEX_HEADS] float32 <-
    projected_width,
    in_width,
    weight_scale,
    eps,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_INDEX_HEADS: tl.constexpr,  # 0: none
    INDEX_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # at least DIM // 2
    BLOCK_INDEX: tl.constexpr,  # at least INDEX_DIM // 2
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = projected + row * projected_width
    if head < NUM_HEADS:
        first, second, p = _pairs(x + head * DIM, DIM, BLOCK_PAIRS)
        scale = tl.math.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + eps)
        _store_rotated(
            q + (row * NUM_HEADS + head) * DIM, first * scale, second * scale, cos, sin, row, p, 1.0, DIM, HALF
        )
    elif NUM_INDEX_HEADS:
        head -= NUM_HEADS
        of_head = row * NUM_INDEX_HEADS + head
        index_first, index_second, i = _pairs(x + NUM_HEADS * DIM + head * INDEX_DIM, INDEX_DIM, BLOCK_INDEX)
        _store_rotated(index_q + of_head * INDEX_DIM, index_first, index_second, cos, sin, row, i, 1.0, INDEX_DIM, HALF)
        counts = tl.load(inputs + row * in_width + in_width - NUM_INDEX_HEADS + head).to(tl.float32)
        tl.store(index_weights + of_head, counts * weight_scale)


@triton.jit
def unrotate_kernel(
    attended,  # [num_rows, NUM_HEADS, DIM]
    cos,  # [num_rows, HALF] float32
    sin,
    groups,  # [num_groups, num_rows, HEADS * DIM] <- attended, with the rotation of the row's position undone
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a group
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # at least DIM // 2
):
    row, head, num_rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    first, second, p = _pairs(attended + (row * NUM_HEADS + head) * DIM, DIM, BLOCK_PAIRS)
    out = groups + ((head // HEADS * num_rows + row) * HEADS + head % HEADS) * DIM
    _store_rotated(out, first, second, cos, sin, row, p, -1.0, DIM, HALF)


@triton.jit
def _pairs(x, DIM: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Return the first and the second elements of DIM / 2 pairs, float32, and the pairs' indices."""
    p = tl.arange(0, BLOCK_PAIRS)
    inside = p < DIM // 2
    first = tl.load(x + 2 * p, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(x + 2 * p + 1, mask=inside, other=0.0).to(tl.float32), p


@triton.jit
def _normed(first, second, norm, p, DIM: tl.constexpr, eps):
    """RMSNorm of a row, given and returned as the first and the second elements of its pairs."""
    scale = tl.math.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + eps)
    inside = p < DIM // 2
    first *= scale * tl.load(norm + 2 * p, mask=inside, other=0.0)
    return first, second * scale * tl.load(norm + 2 * p + 1, mask=inside, other=0.0)


@triton.jit
def _store_rotated(out, first, second, cos, sin, row, p, direction, DIM: tl.constexpr, HALF: tl.constexpr):
    """Write the pairs to out, the last HALF of them rotated. direction: 1, or -1 to rotate back."""
    angle = p - (DIM // 2 - HALF)
    inside, is_rotated = p < DIM // 2, (angle >= 0) & (angle < HALF)
    c = tl.load(cos + row * HALF + angle, mask=is_rotated, other=1.0)
    s = tl.load(sin + row * HALF + angle, mask=is_rotated, other=0.0) * direction
    tl.store(out + 2 * p, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + 2 * p + 1, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_tokens(token, of_bias, channels, mask, most, total, sums, GATE_AT: tl.constexpr):
    """Update an online softmax over tokens, for each channel, with some more tokens."""
    kv = tl.load(token[:, None] + channels[None, :], mask=mask, other=0.0)
    gate = tl.load(token[:, None] + GATE_AT + channels[None, :], mask=mask, other=-float("inf"))
    gate += tl.load(of_bias[:, None] + channels[None, :], mask=mask, other=0.0)
    new_most = tl.maximum(most, tl.max(gate, axis=0))
    base = tl.where(new_most == -float("inf"), 0.0, new_most)
    share, before = tl.exp(gate - base[None, :]), tl.exp(most - base)
    return new_most, total * before + tl.sum(share, axis=0), sums * before + tl.sum(share * kv, axis=0)
