"""Layers of `RecurrentSpec`: convolutions of channels, and memories. A program owns a part of a request's state.

The program of a request's first row in the step processes all of its rows, in the order in which they stand there.
"""

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier


@triton.jit(do_not_specialize=["num_rows"])
def mix_kernel(
    inputs,  # [num_rows, in_width]: the channels come first; if GATED, gates before and gates after the convolution
    conv,  # [num_channels, CONV_LEN] float32
    conv_bias,  # [num_channels] float32; not read unless HAS_BIAS
    tail_lens,  # [num_rows] int32; 0: the row is idle
    tail_ids,
    versions,  # [num_tails] int64
    conv_state,  # [num_tails, VERSIONS, num_channels, CONV_LEN - 1] float32
    mixed,  # [num_rows, num_channels] <- silu(the convolution of the channels' last inputs), or that times the gates
    num_rows,
    in_width,
    num_channels,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONV_LEN: tl.constexpr,
    BLOCK_LEN: tl.constexpr,  # at least CONV_LEN
    VERSIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    tail, is_first = _request(tail_lens, tail_ids, row, num_rows, BLOCK_ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_LEN)
    inside = (c < num_channels)[:, None] & (j < CONV_LEN)[None, :]
    weights = tl.load(conv + c[:, None] * CONV_LEN + j[None, :], mask=inside, other=0.0)
    bias = tl.load(conv_bias + c, mask=c < num_channels, other=0.0) if HAS_BIAS else 0.0
    wait_for_earlier(PDL)
    if is_first:
        version = tl.load(versions + tail)
        places = (c[:, None] * (CONV_LEN - 1) + j[None, :]).to(tl.int64)
        of_tail = tail * VERSIONS * num_channels * (CONV_LEN - 1)
        version_stride = num_channels * (CONV_LEN - 1)
        is_kept = inside & (j < CONV_LEN - 1)[None, :]
        # each channel's last inputs; the last column is for the row's own input
        seen = tl.load(conv_state + of_tail + version * version_stride + places, mask=is_kept, other=0.0)
        for other in range(row, num_rows):
            if _is_of(tail_lens, tail_ids, other, tail):
                at = inputs + other * in_width + c
                own = tl.load(at, mask=c < num_channels, other=0.0).to(tl.float32)
                if GATED:
                    own *= tl.load(at + num_channels, mask=c < num_channels, other=0.0).to(tl.float32)
                seen = tl.where((j == CONV_LEN - 1)[None, :], own[:, None], seen)
                total = tl.sum(seen * weights, axis=1) + bias
                if GATED:
                    value = total * tl.load(at + 2 * num_channels, mask=c < num_channels, other=0.0).to(tl.float32)
                else:
                    value = total * tl.sigmoid(total)
                value = value.to(mixed.dtype.element_ty)
                tl.store(mixed + other * num_channels + c, value, mask=c < num_channels)
                seen = _shifted(seen, j, CONV_LEN, BLOCK_LEN)
        tl.store(conv_state + of_tail + (version + 1) % VERSIONS * version_stride + places, seen, mask=is_kept)


@triton.jit
def _shifted(seen, j, CONV_LEN: tl.constexpr, BLOCK_LEN: tl.constexpr):
    """Shift the columns of seen [..., BLOCK_LEN] left by one."""
    moved = seen * 0.0
    for i in tl.static_range(CONV_LEN - 1):
        following = tl.sum(tl.where((j == i + 1)[None, :], seen, 0.0), axis=1)
        moved = tl.where((j == i)[None, :], following[:, None], moved)
    return moved


@triton.jit(do_not_specialize=["num_rows"])
def delta_rule_kernel(
    inputs,  # [num_rows, in_width]: after the channels come the gates, then how much is written and forgotten
    mixed,  # [num_rows, num_channels]: queries, keys, values
    decay,  # [NUM_V_HEADS] float32
    step_bias,
    norm,  # [V_DIM] float32
    tail_lens,
    tail_ids,
    versions,
    memory,  # [num_tails, VERSIONS, NUM_V_HEADS, K_DIM, V_DIM] float32
    out,  # [num_rows, NUM_V_HEADS, V_DIM] <-
    num_rows,
    in_width,
    num_channels,
    eps,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    VERSIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    tail, is_first = _request(tail_lens, tail_ids, row, num_rows, BLOCK_ROWS)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    is_k, is_v = i < K_DIM, j < V_DIM
    weights = tl.load(norm + j, mask=is_v, other=0.0)
    head_decay, head_bias = tl.load(decay + head), tl.load(step_bias + head)
    wait_for_earlier(PDL)
    if is_first:
        version = tl.load(versions + tail)
        size: tl.constexpr = K_DIM * V_DIM
        places = (i[:, None] * V_DIM + j[None, :]).to(tl.int64)
        inside = is_k[:, None] & is_v[None, :]
        of_tail = (tail * VERSIONS * NUM_V_HEADS + head) * size
        version_stride = NUM_V_HEADS * size
        state = tl.load(memory + of_tail + version * version_stride + places, mask=inside, other=0.0)
        k_head = head // (NUM_V_HEADS // NUM_K_HEADS)
        for other in range(row, num_rows):
            if _is_of(tail_lens, tail_ids, other, tail):
                channels = mixed + other * num_channels
                q = _unit(channels + k_head * K_DIM, i, is_k) * (K_DIM**-0.5)
                k = _unit(channels + (NUM_K_HEADS + k_head) * K_DIM, i, is_k)
                v = tl.load(channels + 2 * NUM_K_HEADS * K_DIM + head * V_DIM + j, mask=is_v, other=0.0).to(tl.float32)
                of_row = inputs + other * in_width + num_channels
                z = tl.load(of_row + head * V_DIM + j, mask=is_v, other=0.0).to(tl.float32)
                written = tl.sigmoid(tl.load(of_row + NUM_V_HEADS * V_DIM + head).to(tl.float32))
                x = tl.load(of_row + NUM_V_HEADS * (V_DIM + 1) + head).to(tl.float32) + head_bias
                state = state * tl.exp(-head_decay * _softplus(x))
                change = (v - tl.sum(state * k[:, None], axis=0)) * written
                state += k[:, None] * change[None, :]
                read = tl.sum(state * q[:, None], axis=0)
                value = read * tl.math.rsqrt(tl.sum(read * read, axis=0) / V_DIM + eps) * weights * z * tl.sigmoid(z)
                at = (other * NUM_V_HEADS + head) * V_DIM + j
                tl.store(out + at, value.to(out.dtype.element_ty), mask=is_v)
        tl.store(memory + of_tail + (version + 1) % VERSIONS * version_stride + places, state, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def scan_kernel(
    inputs,  # [num_rows, in_width]: after the channels come the gates, then steps
    mixed,  # [num_rows, num_channels]: values, then where each group writes and where it reads
    decay,  # [NUM_HEADS] float32
    step_bias,
    skip,
    tail_lens,
    tail_ids,
    versions,
    memory,  # [num_tails, VERSIONS, NUM_HEADS, STATE_DIM, HEAD_DIM] float32
    out,  # [num_rows, NUM_HEADS, HEAD_DIM] <- before gates and norm
    num_rows,
    in_width,
    num_channels,
    least_step,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VERSIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # of a head's dimensions
    BLOCK_STATE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    tail, is_first = _request(tail_lens, tail_ids, row, num_rows, BLOCK_ROWS)
    i = tl.arange(0, BLOCK_STATE)
    j = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    is_place, is_value = i < STATE_DIM, j < HEAD_DIM
    head_decay, head_bias, head_skip = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
    wait_for_earlier(PDL)
    if is_first:
        version = tl.load(versions + tail)
        size: tl.constexpr = HEAD_DIM * STATE_DIM
        places = (i[:, None] * HEAD_DIM + j[None, :]).to(tl.int64)
        inside = is_place[:, None] & is_value[None, :]
        of_tail = (tail * VERSIONS * NUM_HEADS + head) * size
        version_stride = NUM_HEADS * size
        state = tl.load(memory + of_tail + version * version_stride + places, mask=inside, other=0.0)
        width: tl.constexpr = NUM_HEADS * HEAD_DIM
        write_at = width + head // (NUM_HEADS // NUM_GROUPS) * STATE_DIM
        for other in range(row, num_rows):
            if _is_of(tail_lens, tail_ids, other, tail):
                channels = mixed + other * num_channels
                value = tl.load(channels + head * HEAD_DIM + j, mask=is_value, other=0.0).to(tl.float32)
                write = tl.load(channels + write_at + i, mask=is_place, other=0.0).to(tl.float32)
                read = tl.load(channels + write_at + NUM_GROUPS * STATE_DIM + i, mask=is_place, other=0.0)
                x = tl.load(inputs + other * in_width + num_channels + width + head).to(tl.float32) + head_bias
                step = tl.maximum(_softplus(x), least_step)
                state = state * tl.exp(-head_decay * step) + write[:, None] * (step * value)[None, :]
                total = tl.sum(state * read.to(tl.float32)[:, None], axis=0) + head_skip * value
                at = (other * NUM_HEADS + head) * HEAD_DIM + j
                tl.store(out + at, total.to(out.dtype.element_ty), mask=is_value)
        tl.store(memory + of_tail + (version + 1) % VERSIONS * version_stride + places, state, mask=inside)


@triton.jit
def gated_norm_kernel(
    inputs,  # [num_rows, in_width]: gates begin at num_channels
    norm,  # [num_groups * group_width] float32
    out,  # [num_rows, num_groups * group_width] <- norm(out * silu(gates)) over each group
    in_width,
    num_channels,
    group_width,
    eps,
    BLOCK: tl.constexpr,  # at least group_width
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < group_width
    i += tl.program_id(1) * group_width
    weights = tl.load(norm + i, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    z = tl.load(inputs + row * in_width + num_channels + i, mask=inside, other=0.0).to(tl.float32)
    at = out + row * tl.num_programs(1) * group_width + i
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * z * tl.sigmoid(z)
    value = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / group_width + eps) * weights
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _unit(at, i, inside):
    x = tl.load(at + i, mask=inside, other=0.0).to(tl.float32)
    return x * tl.math.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _request(tail_lens, tail_ids, row, num_rows, BLOCK_ROWS: tl.constexpr):
    """Return the row's tail, and whether the row is not idle and the first of its request in the step."""
    r = tl.arange(0, BLOCK_ROWS)
    tail = tl.load(tail_ids + row)
    others = tl.load(tail_ids + r, mask=r < num_rows, other=-1)
    active = tl.load(tail_lens + r, mask=r < num_rows, other=0) > 0
    before = tl.sum(((others == tail) & active & (r < row)).to(tl.int32), axis=0)
    return tail.to(tl.int64), (before == 0) & (tl.load(tail_lens + row) > 0)


@triton.jit
def _is_of(tail_lens, tail_ids, row, tail):
    return (tl.load(tail_ids + row) == tail) & (tl.load(tail_lens + row) > 0)
