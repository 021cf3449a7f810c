"""What a step does to each row by itself, as stages of a tape: embed, normalise, rotate, predict. Stream in float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at
from csattn.cpu.floats import LANES, load_float, load_floats, store_float, sum_of
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma
from csattn.cpu.simd import F32x16, fill, load, store

EMBED = ("token_ids", "embedding", "vocab_size", "width", "out")
NORMALISE = ("x", "width", "weight", "out", "weight_ahead", "out_ahead", "eps")  # eps: address of a float64
ROTATE = (
    "qkv",  # [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim]
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "q_norm",  # [head_dim], or 0
    "k_norm",
    "eps",
    "cos",  # [num_rows, head_dim // 2] float32
    "sin",
    "tails",  # of the layer, [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
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
    "eps",
    "cos",
    "sin",
    "maps",  # [num_rows] addresses of [num_q_heads, head_dim + 1, head_dim] float32, 0: nothing is predicted
    "q",  # [num_rows, num_q_heads, head_dim], written
)


def row_stage(name: str, kind: str) -> Stage:
    """embed, normalise and rotate take a row for a piece, predict a query head of a row. kind: dtype of the weights."""
    return _STAGES[name, kind]


def _embed_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 5, np.int64(0)), piece, np.float32(0))
    return 0


def _embed_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 5, np.int64(0)), piece, np.uint16(0))
    return 0


def _embed_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _embed(array_at(arguments, 5, np.int64(0)), piece, np.int16(0))
    return 0


def _normalise_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _normalise(array_at(arguments, 7, np.int64(0)), piece, np.float32(0))
    return 0


def _normalise_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _normalise(array_at(arguments, 7, np.int64(0)), piece, np.uint16(0))
    return 0


def _normalise_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _normalise(array_at(arguments, 7, np.int64(0)), piece, np.int16(0))
    return 0


def _rotate_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 14, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _rotate_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 14, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _rotate_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _rotate(array_at(arguments, 14, np.int64(0)), piece, np.int16(0), 2)
    return 0


def _predict_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _predict(array_at(arguments, 9, np.int64(0)), piece, np.float32(0))
    return 0


def _predict_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _predict(array_at(arguments, 9, np.int64(0)), piece, np.uint16(0))
    return 0


def _predict_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _predict(array_at(arguments, 9, np.int64(0)), piece, np.int16(0))
    return 0


_STAGES: dict[tuple[str, str], Stage] = {
    ("embed", "float32"): _embed_float32,
    ("embed", "bfloat16"): _embed_bfloat16,
    ("embed", "float16"): _embed_float16,
    ("normalise", "float32"): _normalise_float32,
    ("normalise", "bfloat16"): _normalise_bfloat16,
    ("normalise", "float16"): _normalise_float16,
    ("rotate", "float32"): _rotate_float32,
    ("rotate", "bfloat16"): _rotate_bfloat16,
    ("rotate", "float16"): _rotate_float16,
    ("predict", "float32"): _predict_float32,
    ("predict", "bfloat16"): _predict_bfloat16,
    ("predict", "float16"): _predict_float16,
}


@exact_kernel
def _embed(args: NDArray[np.int64], row: int, like: Any) -> None:
    token_ids, embedding, vocab_size, width, out = args[0], args[1], args[2], args[3], args[4]
    token_id = array_at(token_ids, row + 1, np.int64(0))[row]
    words = array_at(embedding, vocab_size * width, like)
    stream = array_at(out + 4 * row * width, width, np.float32(0))
    for i in range(width):
        stream[i] = load_float(words, token_id * width + i)


@exact_kernel
def _normalise(args: NDArray[np.int64], row: int, like: Any) -> None:
    width = args[1]
    x = array_at(args[0] + 4 * row * width, width, np.float32(0))
    scale = _inverse_rms(x, 0, width, array_at(args[6], 1, np.float64(0))[0])
    _scaled(x, scale, array_at(args[2], width, like), array_at(args[3] + 4 * row * width, width, np.float32(0)))
    if args[4] != 0:
        _scaled(x, scale, array_at(args[4], width, like), array_at(args[5] + 4 * row * width, width, np.float32(0)))


@exact_kernel
def _inverse_rms(x: NDArray[np.float32], first: int, width: int, eps: float) -> Any:
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
def _scaled(x: NDArray[np.float32], scale: np.float32, weight: Any, out: NDArray[np.float32]) -> None:
    """out = x * scale * weight"""
    whole = len(x) - len(x) % LANES
    for i in range(0, whole, LANES):
        store(out, i, load(F32x16, x, i) * fill(F32x16, scale) * load_floats(weight, i))
    for i in range(whole, len(x)):
        out[i] = x[i] * scale * load_float(weight, i)


@exact_kernel
def _rotate(args: NDArray[np.int64], row: int, like: Any, itemsize: int) -> None:
    num_q_heads, num_kv_heads, head_dim, half = args[1], args[2], args[3], args[3] // 2
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    heads = array_at(args[0] + 4 * row * width, width, np.float32(0))
    eps = array_at(args[6], 1, np.float64(0))[0]
    cos = array_at(args[7] + 4 * row * half, half, np.float32(0))
    sin = array_at(args[8] + 4 * row * half, half, np.float32(0))
    q = array_at(args[13] + 4 * row * num_q_heads * head_dim, num_q_heads * head_dim, np.float32(0))
    for head in range(num_q_heads):
        _normalise_head(heads, head * head_dim, head_dim, args[4], eps, like)
        _turn(heads, head * head_dim, cos, sin, q, head * head_dim)
    capacity = args[10]
    tail_id = array_at(args[11], row + 1, np.int64(0))[row]
    place = array_at(args[12], row + 1, np.int64(0))[row] - 1
    turned = np.empty(head_dim, np.float32)
    for head in range(num_kv_heads):
        k_at = (num_q_heads + head) * head_dim
        v_at = k_at + num_kv_heads * head_dim
        _normalise_head(heads, k_at, head_dim, args[5], eps, like)
        _turn(heads, k_at, cos, sin, turned, 0)
        at = ((tail_id * num_kv_heads + head) * capacity + place) * 2 * head_dim
        kv = array_at(args[9] + at * itemsize, 2 * head_dim, like)
        for i in range(head_dim):
            store_float(kv, i, turned[i])
            store_float(kv, head_dim + i, heads[v_at + i])


@exact_kernel
def _normalise_head(heads: NDArray[np.float32], at: int, head_dim: int, norm: int, eps: float, like: Any) -> None:
    """RMSNorm of one head in place, with the weights at that address, if there are any."""
    if norm != 0:
        scale, weight = _inverse_rms(heads, at, head_dim, eps), array_at(norm, head_dim, like)
        for i in range(head_dim):
            heads[at + i] = heads[at + i] * scale * load_float(weight, i)


@exact_kernel
def _turn(
    x: NDArray[np.float32],
    at: int,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    out: NDArray[np.float32],
    to: int,
) -> None:
    """RoPE of one head."""
    half = len(cos)
    for i in range(half):
        first, second = x[at + i], x[at + half + i]
        out[to + i] = first * cos[i] - second * sin[i]
        out[to + half + i] = second * cos[i] + first * sin[i]


@exact_kernel
def _predict(args: NDArray[np.int64], piece: int, like: Any) -> None:
    num_q_heads, head_dim, half = args[1], args[2], args[2] // 2
    row, head = piece // num_q_heads, piece % num_q_heads
    maps = array_at(args[7], row + 1, np.int64(0))[row]
    if maps == 0:
        return
    size = (head_dim + 1) * head_dim
    matrix = array_at(maps + 4 * head * size, size, np.float32(0))
    early = array_at(args[0] + 4 * piece * head_dim, head_dim, np.float32(0))
    _normalise_head(early, 0, head_dim, args[3], array_at(args[4], 1, np.float64(0))[0], like)
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
    cos = array_at(args[5] + 4 * row * half, half, np.float32(0))
    sin = array_at(args[6] + 4 * row * half, half, np.float32(0))
    _turn(mapped, 0, cos, sin, array_at(args[8] + 4 * piece * head_dim, head_dim, np.float32(0)), 0)
