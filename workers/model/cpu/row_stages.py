"""What a step does to each row by itself, as stages of a tape. The stream is float32, and so are norms."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at
from csattn.cpu.floats import LANES, exp_lanes, load_float, store_float, sum_of
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma
from csattn.cpu.simd import F32x16, fill, load, store

# The stages' arguments: sizes, and addresses of float32 but where something else is said. eps, multiplier and cap are
# addresses of float64.
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
    "added",  # [num_rows, width]: multiplier * norm(added) is added to hidden first; or 0
    "added_norm",  # [width]
    "multiplier",
    "norm",  # [width], or 0: hidden as it is
    "out",  # [num_rows, width] <- norm(hidden)
    "norm_ahead",  # likewise, or 0: nothing is written
    "out_ahead",
    "eps",
    "centred",  # 1: the mean is taken off hidden first
)
ROTATE = (
    "qkv",  # [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim], normed in place
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "q_norm",  # [head_dim], or 0
    "k_norm",
    "together",  # 1: q_norm and k_norm are of all heads together, [num_heads * head_dim]
    "eps",
    "cos",  # [num_rows, half]
    "sin",
    "q_scale",  # [num_rows], or 0
    "half",  # pairs of dimensions that turn: the first 2 * half
    "interleaved",  # 1: they are 2i and 2i + 1; 0: i and i + half
    "tails",  # of the layer, [num_tails, num_kv_heads, tail_capacity, 2, head_dim], of the model's dtype
    "tail_capacity",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
    "q",  # [num_rows, num_q_heads, head_dim], written
)
PREDICT = (
    "early",  # [num_rows, num_q_heads * head_dim]
    "num_q_heads",
    "head_dim",
    "q_norm",
    "together",
    "eps",
    "cos",
    "sin",
    "q_scale",
    "half",
    "interleaved",
    "maps",  # [num_rows] addresses of [num_q_heads, head_dim + 1, head_dim], 0: nothing is predicted
    "q",  # [num_rows, num_q_heads, head_dim], written
)
GATE = ("x", "gates", "width")  # [num_rows, width] both; x *= sigmoid(gates)
FINISH_LOGITS = ("logits", "vocab_size", "multiplier", "cap")  # [num_rows, vocab_size], written; no cap: 0


def row_stage(name: str, kind: str) -> Stage:
    """predict takes a query head of a row for a piece, the others a row. kind: dtype of the model's weights."""
    return _STAGES[name].get(kind) or _STAGES[name]["any"]


def _embed_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 6, np.int64(0)), piece, np.float32(0))
    return 0


def _embed_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 6, np.int64(0)), piece, np.uint16(0))
    return 0


def _embed_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 6, np.int64(0)), piece, np.int16(0))
    return 0


def _rotate_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 18, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _rotate_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 18, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _rotate_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 18, np.int64(0)), piece, np.int16(0), 2)
    return 0


def _prepare_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    _prepare(array_at(arguments, 11, np.int64(0)), piece)
    return 0


def _predict_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    _predict(array_at(arguments, 13, np.int64(0)), piece)
    return 0


def _gate_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    args = array_at(arguments, 3, np.int64(0))
    x, gates = _floats(args[0], piece, args[2]), _floats(args[1], piece, args[2])
    for i in range(args[2]):
        x[i] /= np.float32(1.0) + np.exp(-gates[i])
    return 0


def _finish_logits_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    _finish_logits(array_at(arguments, 4, np.int64(0)), piece)
    return 0


_STAGES: dict[str, dict[str, Stage]] = {
    "embed": {"float32": _embed_float32, "bfloat16": _embed_bfloat16, "float16": _embed_float16},
    "rotate": {"float32": _rotate_float32, "bfloat16": _rotate_bfloat16, "float16": _rotate_float16},
    "prepare": {"any": _prepare_stage},
    "predict": {"any": _predict_stage},
    "gate": {"any": _gate_stage},
    "finish_logits": {"any": _finish_logits_stage},
}


@exact_kernel
def _embed(args: NDArray[np.int64], row: int, like: Any) -> None:
    token_ids, embedding, vocab_size, width, out = args[0], args[1], args[2], args[3], args[5]
    token_id = array_at(token_ids, row + 1, np.int64(0))[row]
    words = array_at(embedding, vocab_size * width, like)
    stream, multiplier = _floats(out, row, width), _number(args[4])
    for i in range(width):
        stream[i] = multiplier * load_float(words, token_id * width + i)


@exact_kernel
def _prepare(args: NDArray[np.int64], row: int) -> None:
    width, eps = args[1], _number(args[9])
    hidden = _floats(args[0], row, width)
    if args[2] != 0:
        added, weight, multiplier = _floats(args[2], row, width), _floats(args[3], 0, width), _number(args[4])
        scale = inverse_rms(added, 0, width, eps)
        for i in range(width):
            hidden[i] += multiplier * (added[i] * scale * weight[i])
    if args[10] != 0:
        total = np.float32(0.0)
        for i in range(width):
            total += hidden[i]
        hidden -= total / np.float32(width)
    out = _floats(args[6], row, width)
    if args[5] == 0:
        out[:] = hidden
        return
    scale = inverse_rms(hidden, 0, width, eps)
    _scaled(hidden, scale, _floats(args[5], 0, width), out)
    if args[7] != 0:
        _scaled(hidden, scale, _floats(args[7], 0, width), _floats(args[8], row, width))


@exact_kernel
def _rotate(args: NDArray[np.int64], row: int, like: Any, itemsize: int) -> None:
    num_q_heads, num_kv_heads, head_dim = args[1], args[2], args[3]
    q_width, kv_width = num_q_heads * head_dim, num_kv_heads * head_dim
    heads = _floats(args[0], row, q_width + 2 * kv_width)
    q_norm, k_norm, together, eps = args[4], args[5], args[6] != 0, _number(args[7])
    half, interleaved = args[11], args[12] != 0
    cos, sin, q = _floats(args[8], row, half), _floats(args[9], row, half), _floats(args[17], row, q_width)
    by_row = _of_row(args[10], row)
    q_scale, k_scale, skip = np.float32(0.0), np.float32(0.0), 0
    if together and q_norm != 0:
        q_scale, k_scale = inverse_rms(heads, 0, q_width, eps), inverse_rms(heads, q_width, kv_width, eps)
        skip = 4 * head_dim
    for head in range(num_q_heads):
        at = head * head_dim
        if q_norm != 0:
            _normalise_head(heads, at, head_dim, q_norm + head * skip, q_scale, eps)
        turn(heads, at, head_dim, cos, sin, interleaved, q, at)
    for i in range(q_width):
        q[i] *= by_row
    capacity = args[14]
    tail_id = array_at(args[15], row + 1, np.int64(0))[row]
    place = array_at(args[16], row + 1, np.int64(0))[row] - 1
    turned = np.empty(head_dim, np.float32)
    for head in range(num_kv_heads):
        k_at = q_width + head * head_dim
        v_at = k_at + kv_width
        if k_norm != 0:
            _normalise_head(heads, k_at, head_dim, k_norm + head * skip, k_scale, eps)
        turn(heads, k_at, head_dim, cos, sin, interleaved, turned, 0)
        at = ((tail_id * num_kv_heads + head) * capacity + place) * 2 * head_dim
        kv = array_at(args[13] + at * itemsize, 2 * head_dim, like)
        for i in range(head_dim):
            store_float(kv, i, turned[i])
            store_float(kv, head_dim + i, heads[v_at + i])


@exact_kernel
def _predict(args: NDArray[np.int64], piece: int) -> None:
    num_q_heads, head_dim, q_norm, together, eps = args[1], args[2], args[3], args[4] != 0, _number(args[5])
    row, head = piece // num_q_heads, piece % num_q_heads
    maps = array_at(args[11], row + 1, np.int64(0))[row]
    if maps == 0:
        return
    matrix = _floats(maps, head, (head_dim + 1) * head_dim)
    all_heads = _floats(args[0], row, num_q_heads * head_dim)  # which the row's other pieces read too
    early = np.empty(head_dim, np.float32)
    for i in range(head_dim):
        early[i] = all_heads[head * head_dim + i]
    if q_norm != 0 and together:
        scale = inverse_rms(all_heads, 0, len(all_heads), eps)
        _normalise_head(early, 0, head_dim, q_norm + 4 * head * head_dim, scale, eps)
    elif q_norm != 0:
        _normalise_head(early, 0, head_dim, q_norm, np.float32(0.0), eps)
    mapped = np.empty(head_dim, np.float32)
    whole = head_dim - head_dim % LANES
    for j in range(0, whole, LANES):
        sums = fill(F32x16, 0.0)
        for i in range(head_dim):
            sums = fma(fill(F32x16, early[i]), load(F32x16, matrix, i * head_dim + j), sums)
        store(mapped, j, sums + load(F32x16, matrix, head_dim * head_dim + j))
    for j in range(whole, head_dim):
        total = np.float32(0.0)
        for i in range(head_dim):
            total += early[i] * matrix[i * head_dim + j]
        mapped[j] = total + matrix[head_dim * head_dim + j]
    half, interleaved = args[9], args[10] != 0
    cos, sin, q = _floats(args[6], row, half), _floats(args[7], row, half), _floats(args[12], piece, head_dim)
    turn(mapped, 0, head_dim, cos, sin, interleaved, q, 0)
    by_row = _of_row(args[8], row)
    for i in range(head_dim):
        q[i] *= by_row


@exact_kernel
def _finish_logits(args: NDArray[np.int64], row: int) -> None:
    logits, multiplier = _floats(args[0], row, args[1]), _number(args[2])
    cap = np.float32(0.0) if args[3] == 0 else _number(args[3])
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
                if logits[first + i] == logits[first + i]:  # what is no number stays none
                    logits[first + i] = cap * (np.float32(1.0) - np.float32(2.0) / (np.float32(1.0) + powers[i]))


@exact_kernel
def _floats(address: int, row: int, width: int) -> Any:
    """A row of float32."""
    return array_at(address + 4 * row * width, width, np.float32(0))


@exact_kernel
def _of_row(q_scale: int, row: int) -> Any:
    return np.float32(1.0) if q_scale == 0 else array_at(q_scale, row + 1, np.float32(0))[row]


@exact_kernel
def _number(address: int) -> Any:
    return np.float32(array_at(address, 1, np.float64(0))[0])


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
def _scaled(x: NDArray[np.float32], scale: np.float32, weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
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
    """RMSNorm of one head in place, with the weights at that address. scale: of all heads together, or 0."""
    if scale == 0:
        scale = inverse_rms(heads, at, head_dim, eps)
    weight = array_at(norm, head_dim, np.float32(0))
    for i in range(head_dim):
        heads[at + i] = heads[at + i] * scale * weight[i]


@exact_kernel
def turn(
    x: NDArray[np.float32],
    at: int,
    head_dim: int,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
    out: NDArray[np.float32],
    to: int,
) -> None:
    """RoPE of one head: its first dimensions turn in pairs, the others stay."""
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
