"""What a step does to rows of latents by themselves, as stages of a tape: see `csattn.models.latent`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at
from csattn.cpu.floats import LANES, load_float, load_floats, store_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma
from csattn.cpu.simd import F32x16, fill, store
from workers.model.cpu.linear import TILE, products
from workers.model.cpu.row_stages import inverse_rms, turn

# The stages' arguments: sizes, and addresses of float32 but where something else is said.
APPEND = (
    "inputs",  # [num_rows, in_width]
    "in_width",
    "q_rank",  # numbers of the queries' latents, which come first; 0: there are none
    "key_at",  # where the row's key begins: the latent, then what turns
    "kv_rank",
    "index_at",  # and its index key
    "index_dim",  # 0: there is none
    "index_interleaved",
    "q_norm",  # [q_rank]
    "kv_norm",  # [kv_rank]
    "index_norm",  # [2, index_dim]: weights and biases
    "cos",  # [num_rows, half]
    "sin",
    "half",  # pairs of dimensions that turn
    "interleaved",
    "tails",  # of the layer, [num_tails, tail_capacity, width], of the model's dtype
    "tail_capacity",
    "width",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
    "q_latents",  # [num_rows, q_rank], written
)
ASK = (
    "inputs",  # [num_rows, in_width]: how much each index head counts comes last
    "in_width",
    "projected",  # [num_rows, projected_width]: all heads' queries, then those of the index heads
    "projected_width",
    "num_heads",
    "nope_dim",
    "kv_rank",
    "up_k",  # of the model's dtype; heads of [nope_dim, kv_rank], head_stride apart
    "head_stride",  # elements
    "cos",
    "sin",
    "half",
    "interleaved",
    "num_index_heads",
    "index_dim",
    "index_interleaved",
    "weight_scale",  # address of a float64
    "q",  # [num_rows, num_heads, kv_rank + 2 * half], written
    "index_q",  # [num_rows, num_index_heads, index_dim], written
    "index_weights",  # [num_rows, num_index_heads], written
)
VALUES = (
    "attended",  # [num_rows, num_heads, kv_rank]
    "num_heads",
    "kv_rank",
    "up_v",  # of the model's dtype; heads of [v_dim, kv_rank], head_stride apart
    "head_stride",  # elements
    "v_dim",
    "values",  # [num_rows, num_heads, v_dim], written
)
_EPS = np.float32(1e-6)  # `csattn.models.latent.EPS`


def latent_stage(name: str, kind: str) -> Stage:
    """append takes a row for a piece, ask a head of a row, index heads last, values a head. kind: of the weights."""
    return _STAGES[name][kind]


def _append_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _append(array_at(arguments, 21, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _append_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _append(array_at(arguments, 21, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _append_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _append(array_at(arguments, 21, np.int64(0)), piece, np.int16(0), 2)
    return 0


def _ask_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _ask(array_at(arguments, 20, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _ask_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _ask(array_at(arguments, 20, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _ask_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _ask(array_at(arguments, 20, np.int64(0)), piece, np.int16(0), 2)
    return 0


def _values_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _values(array_at(arguments, 7, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _values_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _values(array_at(arguments, 7, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _values_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _values(array_at(arguments, 7, np.int64(0)), piece, np.int16(0), 2)
    return 0


_STAGES: dict[str, dict[str, Stage]] = {
    "append": {"float32": _append_float32, "bfloat16": _append_bfloat16, "float16": _append_float16},
    "ask": {"float32": _ask_float32, "bfloat16": _ask_bfloat16, "float16": _ask_float16},
    "values": {"float32": _values_float32, "bfloat16": _values_bfloat16, "float16": _values_float16},
}


@exact_kernel
def _append(args: NDArray[np.int64], row: int, like: Any, itemsize: int) -> None:
    in_width, q_rank, key_at, kv_rank, index_at, index_dim = args[1], args[2], args[3], args[4], args[5], args[6]
    inputs = array_at(args[0] + 4 * row * in_width, in_width, np.float32(0))
    if q_rank > 0:
        norm, out = array_at(args[8], q_rank, np.float32(0)), _floats(args[20], row, q_rank)
        scale = inverse_rms(inputs, 0, q_rank, _EPS)
        for i in range(q_rank):
            out[i] = inputs[i] * scale * norm[i]
    half = args[13]
    cos, sin = _floats(args[11], row, half), _floats(args[12], row, half)
    made = np.zeros(args[17], np.float32)
    norm, scale = array_at(args[9], kv_rank, np.float32(0)), inverse_rms(inputs, key_at, kv_rank, _EPS)
    for i in range(kv_rank):
        made[i] = inputs[key_at + i] * scale * norm[i]
    turn(inputs, key_at + kv_rank, 2 * half, cos, sin, args[14] != 0, made, kv_rank)
    if index_dim > 0:
        normed, norm, mean = np.empty(index_dim, np.float32), array_at(args[10], 2 * index_dim, np.float32(0)), 0.0
        for i in range(index_dim):
            mean += inputs[index_at + i]
        for i in range(index_dim):
            normed[i] = inputs[index_at + i] - mean / index_dim
        scale = inverse_rms(normed, 0, index_dim, _EPS)
        for i in range(index_dim):
            normed[i] = normed[i] * scale * norm[i] + norm[index_dim + i]
        turn(normed, 0, index_dim, cos, sin, args[7] != 0, made, kv_rank + 2 * half)
    tail_id = array_at(args[18], row + 1, np.int64(0))[row]
    place = array_at(args[19], row + 1, np.int64(0))[row] - 1
    kept = array_at(args[15] + (tail_id * args[16] + place) * args[17] * itemsize, args[17], like)
    for i in range(args[17]):
        store_float(kept, i, made[i])


@exact_kernel
def _ask(args: NDArray[np.int64], piece: int, like: Any, itemsize: int) -> None:
    num_heads, nope_dim, kv_rank, num_index_heads, index_dim = args[4], args[5], args[6], args[13], args[14]
    row, head, half = piece // (num_heads + num_index_heads), piece % (num_heads + num_index_heads), args[11]
    projected = _floats(args[2], row, args[3])
    cos, sin = _floats(args[9], row, half), _floats(args[10], row, half)
    if head >= num_heads:
        head -= num_heads
        at = num_heads * (nope_dim + 2 * half) + head * index_dim
        out = _floats(args[18], row * num_index_heads + head, index_dim)
        turn(projected, at, index_dim, cos, sin, args[15] != 0, out, 0)
        weights, scale = _floats(args[19], row, num_index_heads), array_at(args[16], 1, np.float64(0))[0]
        counts = _floats(args[0], row, args[1])
        weights[head] = counts[args[1] - num_index_heads + head] * np.float32(scale)
        return
    at, out = head * (nope_dim + 2 * half), _floats(args[17], row * num_heads + head, kv_rank + 2 * half)
    up = array_at(args[7] + head * args[8] * itemsize, nope_dim * kv_rank, like)
    whole = kv_rank - kv_rank % LANES
    for j in range(0, whole, LANES):
        sums = fill(F32x16, 0.0)
        for i in range(nope_dim):
            sums = fma(fill(F32x16, projected[at + i]), load_floats(up, i * kv_rank + j), sums)
        store(out, j, sums)
    for j in range(whole, kv_rank):
        total = np.float32(0.0)
        for i in range(nope_dim):
            total += projected[at + i] * load_float(up, i * kv_rank + j)
        out[j] = total
    turn(projected, at + nope_dim, 2 * half, cos, sin, args[12] != 0, out, kv_rank)


@exact_kernel
def _values(args: NDArray[np.int64], piece: int, like: Any, itemsize: int) -> None:
    kv_rank, v_dim = args[2], args[5]
    attended, out = _floats(args[0], piece, kv_rank), _floats(args[6], piece, v_dim)
    up = array_at(args[3] + piece % args[1] * args[4] * itemsize, v_dim * kv_rank, like)
    sums = np.empty(LANES + TILE, np.float32)
    for first in range(0, v_dim, LANES):
        count = min(LANES, v_dim - first)
        products(attended, 1, up, kv_rank, first, count, kv_rank, sums)
        for i in range(count):
            out[first + i] = sums[i]


@exact_kernel
def _floats(address: int, row: int, width: int) -> Any:
    """A row of float32."""
    return array_at(address + 4 * row * width, width, np.float32(0))
