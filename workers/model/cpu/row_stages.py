"""Stages of a tape that work on each row by itself. The residual stream and the norms are float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import bytes_of, floats_of, number_at, word_of, words_at
from csattn.cpu.floats import exp_lanes, load_float, store_float, sum_of
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma
from csattn.cpu.simd import LANES, F32x16, fill, load, store
from workers.model.cpu.linear import add_up_rows
from workers.model.cpu.linear_stage import NONE, activate

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise. eps, multiplier, scale and
# cap are addresses of a float64.
EMBED = (
    "token_ids",  # [num_rows] int64
    "embedding",  # [vocab_size, width], of the model's dtype
    "vocab_size",
    "width",
    "multiplier",
    "out",  # [num_rows, width], written
)
PREPARE = (
    "hidden",  # [num_rows, width]
    "width",
    "added",  # [num_rows, width], or 0: first, hidden = scale * (hidden + multiplier * norm(added))
    "added_norm",  # [width]
    "multiplier",
    "scale",
    "norm",  # [width], or 0: out is hidden itself
    "out",  # [num_rows, width] <- norm(hidden)
    "norm_ahead",  # [width], or 0: out_ahead is not written
    "out_ahead",  # [num_rows, width] <- norm_ahead(hidden)
    "eps",
    "centred",  # 1: the mean is subtracted from hidden before the norms
)
ROTATION = (
    "cos",  # [num_rows, half]
    "sin",
    "q_scale",  # [num_rows]: a factor of the queries, not of index heads'; or 0
    "half",  # the number of pairs that RoPE rotates: the first 2 * half dimensions
    "interleaved",  # 1: dimensions 2i and 2i + 1 are a pair; 0: i and i + half
)
_OF_HEADS = (
    "num_q_heads",
    "head_dim",
    "q_norm",  # [head_dim], or 0
    "together",  # 1: q_norm and k_norm apply to all heads together, [num_heads * head_dim]
    "after_rope",  # 1: the weights of q_norm and k_norm multiply after RoPE
    "eps",
    *ROTATION,
    "q",  # [num_rows, num_q_heads, head_dim], written
)
ROTATE = (
    *_OF_HEADS,
    "qkv",  # [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim], normed in place
    "num_kv_heads",
    "k_norm",  # as q_norm
    "v_norm",  # [head_dim], or 0
    "tails",  # of the layer, [num_tails, num_kv_heads, tail_capacity, 2, head_dim], of the model's dtype
    "tail_capacity",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
)
PREDICT = (
    *_OF_HEADS,
    "early",  # [num_rows, num_q_heads * head_dim]
    "maps",  # [num_rows] addresses of [num_q_heads, head_dim + 1, head_dim]; 0: no prediction for the row
)
COPY_ROWS = (
    "source",  # one layer's tails, [num_tails, num_kv_heads, tail_capacity, 2, head_dim], of the model's dtype
    "tails",  # another layer's tails, of the same shape, written
    "num_kv_heads",
    "row_width",  # 2 * head_dim
    "tail_capacity",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
)
MAKE_INPUTS = (
    "projected",  # [num_rows, num_layers * width], scaled in place
    "num_layers",
    "width",
    "norm",  # [width]
    "token_ids",  # [num_rows] int64
    "table",  # [vocab_size, num_layers * width], of the model's dtype
    "vocab_size",
    "scale",
    "table_scale",  # address of a float64
    "eps",
    "out",  # [num_layers, max_rows, width], written
    "max_rows",
)
GATE = ("x", "gates", "activation", "width")  # [num_rows, width] both; x *= activation(gates), for NONE sigmoid(gates)
FINISH_LOGITS = ("logits", "vocab_size", "multiplier", "cap")  # logits: [num_rows, vocab_size], written; cap 0: none
_embed_at, _prepare_at, _rotate_at = words_at(EMBED), words_at(PREPARE), words_at(ROTATE)
_copy_rows_at, _make_inputs_at = words_at(COPY_ROWS), words_at(MAKE_INPUTS)
_predict_at, _gate_at, _finish_logits_at = words_at(PREDICT), words_at(GATE), words_at(FINISH_LOGITS)


def embed_stage(arguments: int, row: int, thread: int, like: Any) -> int:
    """A piece is a row, as in all stages here but `predict_stage`. like: an element of the model's weights."""
    args = _embed_at(arguments)
    width, token_id = args.width, word_of(args.token_ids, row)
    words = array_at(args.embedding, args.vocab_size * width, like)
    stream, multiplier = floats_of(args.out, row, width), number_at(args.multiplier)
    for i in range(width):
        stream[i] = multiplier * load_float(words, token_id * width + i)
    return 0


def prepare_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    """Add a branch's normed output to a row of the stream, if there is one, and norm the row for its next readers."""
    args = _prepare_at(arguments)
    width, eps = args.width, number_at(args.eps)
    hidden = floats_of(args.hidden, row, width)
    if args.added != 0:
        added, weight = floats_of(args.added, row, width), floats_of(args.added_norm, 0, width)
        scale, multiplier, of_all = inverse_rms(added, 0, width, eps), number_at(args.multiplier), number_at(args.scale)
        for i in range(width):
            hidden[i] = (hidden[i] + multiplier * (added[i] * scale * weight[i])) * of_all
    if args.centred != 0:
        total = np.float32(0.0)
        for i in range(width):
            total += hidden[i]
        hidden -= total / np.float32(width)
    out = floats_of(args.out, row, width)
    if args.norm == 0:
        out[:] = hidden
        return 0
    scale = inverse_rms(hidden, 0, width, eps)
    write_scaled(hidden, scale, floats_of(args.norm, 0, width), out)
    if args.norm_ahead != 0:
        write_scaled(hidden, scale, floats_of(args.norm_ahead, 0, width), floats_of(args.out_ahead, row, width))
    return 0


def rotate_stage(arguments: int, row: int, thread: int, like: Any) -> int:
    """Norm and rotate a row's queries and keys; write its queries to q, and append its K and V to its tail."""
    args, itemsize = _rotate_at(arguments), bytes_of(like)
    num_q_heads, num_kv_heads, head_dim = args.num_q_heads, args.num_kv_heads, args.head_dim
    q_width, kv_width = num_q_heads * head_dim, num_kv_heads * head_dim
    heads = floats_of(args.qkv, row, q_width + 2 * kv_width)
    q_norm, k_norm, v_norm, together = args.q_norm, args.k_norm, args.v_norm, args.together != 0
    after_rope = args.after_rope != 0
    eps = number_at(args.eps)
    half, interleaved = args.half, args.interleaved != 0
    cos, sin, q = floats_of(args.cos, row, half), floats_of(args.sin, row, half), floats_of(args.q, row, q_width)
    by_row = _of_row(args.q_scale, row)
    q_scale, k_scale, skip = np.float32(0.0), np.float32(0.0), 0
    if together and q_norm != 0:
        q_scale, k_scale = inverse_rms(heads, 0, q_width, eps), inverse_rms(heads, q_width, kv_width, eps)
        skip = 4 * head_dim
    for head in range(num_q_heads):
        at = head * head_dim
        if q_norm != 0:
            _normalise_head(heads, at, head_dim, 0 if after_rope else q_norm + head * skip, q_scale, eps)
        rotate_pairs(heads, at, head_dim, cos, sin, interleaved, q, at)
        if after_rope:
            _weigh_head(q, at, head_dim, q_norm)
    for i in range(q_width):
        q[i] *= by_row
    capacity = args.tail_capacity
    tail_id = word_of(args.tail_ids, row)
    place = word_of(args.tail_lens, row) - 1
    rotated = np.empty(head_dim, np.float32)
    for head in range(num_kv_heads):
        k_at = q_width + head * head_dim
        v_at = k_at + kv_width
        if k_norm != 0:
            _normalise_head(heads, k_at, head_dim, 0 if after_rope else k_norm + head * skip, k_scale, eps)
        if v_norm != 0:
            _normalise_head(heads, v_at, head_dim, v_norm, np.float32(0.0), eps)
        rotate_pairs(heads, k_at, head_dim, cos, sin, interleaved, rotated, 0)
        if after_rope:
            _weigh_head(rotated, 0, head_dim, k_norm)
        at = ((tail_id * num_kv_heads + head) * capacity + place) * 2 * head_dim
        kv = array_at(args.tails + at * itemsize, 2 * head_dim, like)
        for i in range(head_dim):
            store_float(kv, i, rotated[i])
            store_float(kv, head_dim + i, heads[v_at + i])
    return 0


def predict_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Predict the next layer's query with the maps of the row's context. A piece is a query head of a row."""
    args = _predict_at(arguments)
    num_q_heads, head_dim = args.num_q_heads, args.head_dim
    q_norm, together, eps = args.q_norm, args.together != 0, number_at(args.eps)
    row, head = piece // num_q_heads, piece % num_q_heads
    maps = word_of(args.maps, row)
    if maps == 0:
        return 0
    matrix = floats_of(maps, head, (head_dim + 1) * head_dim)
    all_heads = floats_of(args.early, row, num_q_heads * head_dim)  # read-only: the row's other pieces read it too
    early = np.empty(head_dim, np.float32)
    for i in range(head_dim):
        early[i] = all_heads[head * head_dim + i]
    if q_norm != 0 and together:
        scale = inverse_rms(all_heads, 0, len(all_heads), eps)
        _normalise_head(early, 0, head_dim, q_norm + 4 * head * head_dim, scale, eps)
    elif q_norm != 0:
        _normalise_head(early, 0, head_dim, 0 if args.after_rope else q_norm, np.float32(0.0), eps)
    mapped = np.empty(head_dim, np.float32)
    add_up_rows(early, 0, head_dim, matrix, head_dim, mapped)
    for i in range(head_dim):
        mapped[i] += matrix[head_dim * head_dim + i]
    half, interleaved = args.half, args.interleaved != 0
    cos, sin, q = floats_of(args.cos, row, half), floats_of(args.sin, row, half), floats_of(args.q, piece, head_dim)
    rotate_pairs(mapped, 0, head_dim, cos, sin, interleaved, q, 0)
    if args.after_rope:
        _weigh_head(q, 0, head_dim, q_norm)
    by_row = _of_row(args.q_scale, row)
    for i in range(head_dim):
        q[i] *= by_row
    return 0


def copy_rows_stage(arguments: int, row: int, thread: int, like: Any) -> int:
    args, itemsize = _copy_rows_at(arguments), bytes_of(like)
    tail_id, place, width = word_of(args.tail_ids, row), word_of(args.tail_lens, row) - 1, args.row_width
    for head in range(args.num_kv_heads):
        at = ((tail_id * args.num_kv_heads + head) * args.tail_capacity + place) * width * itemsize
        source, tail = array_at(args.source + at, width, like), array_at(args.tails + at, width, like)
        for i in range(width):
            tail[i] = source[i]
    return 0


def make_inputs_stage(arguments: int, row: int, thread: int, like: Any) -> int:
    args = _make_inputs_at(arguments)
    num_layers, width, eps = args.num_layers, args.width, number_at(args.eps)
    projected, norm = floats_of(args.projected, row, num_layers * width), floats_of(args.norm, 0, width)
    table = array_at(args.table, args.vocab_size * num_layers * width, like)
    first, scale, table_scale = word_of(args.token_ids, row) * num_layers * width, args.scale, args.table_scale
    factor, own_factor = number_at(scale), number_at(table_scale)
    for i in range(num_layers * width):
        projected[i] *= factor
    for layer in range(num_layers):
        at = layer * width
        inverse = inverse_rms(projected, at, width, eps)
        out = floats_of(args.out, layer * args.max_rows + row, width)
        for i in range(width):
            own = own_factor * load_float(table, first + at + i)
            out[i] = np.float32(0.7071067811865476) * (projected[at + i] * inverse * norm[i] + own)
    return 0


def gate_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    args = _gate_at(arguments)
    x, gates = floats_of(args.x, row, args.width), floats_of(args.gates, row, args.width)
    if args.activation == NONE:
        for i in range(args.width):
            x[i] /= np.float32(1.0) + np.exp(-gates[i])
        return 0
    activated, factors = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, args.width, LANES):
        count = min(LANES, args.width - first)
        for i in range(count):
            activated[i], factors[i] = gates[first + i], x[first + i]
        activate(args.activation, activated, factors, 0, count)
        for i in range(count):
            x[first + i] = activated[i]
    return 0


def finish_logits_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    args = _finish_logits_at(arguments)
    logits, multiplier = floats_of(args.logits, row, args.vocab_size), number_at(args.multiplier)
    cap = np.float32(0.0) if args.cap == 0 else number_at(args.cap)
    part, powers = np.zeros(LANES, np.float32), np.empty(LANES, np.float32)
    for first in range(0, len(logits), LANES):
        count = min(LANES, len(logits) - first)
        for i in range(count):
            logits[first + i] *= multiplier
        if cap != 0:  # cap * tanh(logit / cap)
            for i in range(count):
                part[i] = np.float32(2.0) * (logits[first + i] / cap)
            store(powers, 0, exp_lanes(load(F32x16, part, 0)))
            for i in range(count):
                if logits[first + i] == logits[first + i]:  # NaN stays NaN
                    logits[first + i] = cap * (np.float32(1.0) - np.float32(2.0) / (np.float32(1.0) + powers[i]))
    return 0


@exact_kernel
def _of_row(q_scale: int, row: int) -> Any:
    return np.float32(1.0) if q_scale == 0 else array_at(q_scale, row + 1, np.float32(0))[row]


@exact_kernel
def inverse_rms(x: NDArray[np.float32], first: int, width: int, eps: float) -> Any:
    whole = width - width % LANES
    sums = fill(F32x16, 0.0)
    for i in range(first, first + whole, LANES):
        part = load(F32x16, x, i)
        sums = fma(part, part, sums)
    total = sum_of(sums)
    for i in range(first + whole, first + width):
        total += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))


@exact_kernel
def write_scaled(
    x: NDArray[np.float32], scale: np.float32, weight: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """out = x * scale * weight"""
    whole = len(x) - len(x) % LANES
    for i in range(0, whole, LANES):
        store(out, i, load(F32x16, x, i) * fill(F32x16, scale) * load(F32x16, weight, i))
    for i in range(whole, len(x)):
        out[i] = x[i] * scale * weight[i]


@exact_kernel
def _normalise_head(
    heads: NDArray[np.float32], at: int, head_dim: int, norm: int, scale: np.float32, eps: float
) -> None:
    """RMSNorm of one head in place. norm: the address of its weights; 0: all are 1. scale: the inverse root mean square
    of all heads together; 0: this head's own."""
    if scale == 0:
        scale = inverse_rms(heads, at, head_dim, eps)
    if norm == 0:
        for i in range(head_dim):
            heads[at + i] *= scale
        return
    weight = array_at(norm, head_dim, np.float32(0))
    for i in range(head_dim):
        heads[at + i] = heads[at + i] * scale * weight[i]


@exact_kernel
def _weigh_head(heads: NDArray[np.float32], at: int, head_dim: int, norm: int) -> None:
    weight = array_at(norm, head_dim, np.float32(0))
    for i in range(head_dim):
        heads[at + i] *= weight[i]


@exact_kernel
def rotate_pairs(
    x: NDArray[np.float32],
    at: int,
    head_dim: int,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
    out: NDArray[np.float32],
    to: int,
) -> None:
    """RoPE of one head: rotate its first dimensions in pairs and copy the others."""
    half = len(cos)
    if interleaved:
        for i in range(half):
            first, second = x[at + 2 * i], x[at + 2 * i + 1]
            out[to + 2 * i] = first * cos[i] - second * sin[i]
            out[to + 2 * i + 1] = second * cos[i] + first * sin[i]
    else:
        for i in range(half):
            first, second = x[at + i], x[at + half + i]
            out[to + i] = first * cos[i] - second * sin[i]
            out[to + half + i] = second * cos[i] + first * sin[i]
    for i in range(2 * half, head_dim):
        out[to + i] = x[at + i]


@exact_kernel
def sigmoid(x: np.float32) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@exact_kernel
def softplus(x: np.float32) -> Any:
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
