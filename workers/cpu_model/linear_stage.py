"""A linear layer as a stage of a tape: a piece is 16 outputs of all rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at
from csattn.cpu.floats import KINDS, exp_lanes, load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import F32x16, fill, load, store
from workers.cpu_model.linear import LANES, TILE, products

# arguments: addresses, and sizes
LINEAR = ("num_rows", "x", "num_in", "weight", "num_out", "out", "out_width", "bias", "mode", "up_weight")
NUM_ROWS, X, NUM_IN, WEIGHT, NUM_OUT, OUT, OUT_WIDTH, BIAS, MODE, UP_WEIGHT = range(10)
SET, ADD, GATE = range(3)  # out = x @ w + bias; out += x @ w; out = silu(x @ w) * (x @ up)


def linear_pieces(num_out: int) -> int:
    return -(-num_out // LANES)


def linear_stage(kind: str) -> Stage:
    """For weights of that dtype; x and out are float32."""
    return _STAGES[kind]


def _linear_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _linear(arguments, piece, np.float32(0))
    return 0


def _linear_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _linear(arguments, piece, np.uint16(0))
    return 0


def _linear_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _linear(arguments, piece, np.int16(0))
    return 0


_STAGES: dict[str, Stage] = {
    "float32": _linear_float32,
    "bfloat16": _linear_bfloat16,
    "float16": _linear_float16,
}
assert _STAGES.keys() == KINDS.keys()


@exact_kernel
def _linear(arguments: int, piece: int, like: Any) -> None:
    args = array_at(arguments, 10, np.int64(0))
    num_rows = array_at(args[NUM_ROWS], 1, np.int64(0))[0]
    num_in, num_out, width, first = args[NUM_IN], args[NUM_OUT], args[OUT_WIDTH], piece * LANES
    count = min(LANES, num_out - first)
    x = array_at(args[X], num_rows * num_in, np.float32(0))
    out = array_at(args[OUT], num_rows * width, np.float32(0))
    weight = array_at(args[WEIGHT], num_out * num_in, like)
    room = (num_rows + TILE) * LANES
    sums = np.empty(room, np.float32)
    products(x, num_rows, weight, first, count, num_in, sums)
    if args[MODE] == GATE:
        ups = np.empty(room, np.float32)
        products(x, num_rows, array_at(args[UP_WEIGHT], num_out * num_in, like), first, count, num_in, ups)
        for row in range(num_rows):
            _gate(sums, ups, row * LANES, count)
    elif args[BIAS] != 0:
        bias = array_at(args[BIAS], num_out, like)
        for row in range(num_rows):
            for i in range(count):
                sums[row * LANES + i] += load_float(bias, first + i)
    for row in range(num_rows):
        _write(sums, row * LANES, out, row * width + first, count, args[MODE] == ADD)


@exact_kernel
def _gate(gates: NDArray[np.float32], ups: NDArray[np.float32], at: int, count: int) -> None:
    """gates = silu(gates) * ups"""
    for i in range(count, LANES):
        gates[at + i], ups[at + i] = 0.0, 0.0
    lower = exp_lanes(fill(F32x16, 0.0) - load(F32x16, gates, at))
    store(gates, at, load(F32x16, gates, at) * load(F32x16, ups, at))
    powers = np.empty(LANES, np.float32)
    store(powers, 0, lower)
    for i in range(count):
        gates[at + i] /= np.float32(1.0) + powers[i]


@exact_kernel
def _write(sums: NDArray[np.float32], at: int, out: NDArray[np.float32], to: int, count: int, added: bool) -> None:
    if count == LANES:
        value = load(F32x16, sums, at)
        if added:
            value += load(F32x16, out, to)
        store(out, to, value)
        return
    for i in range(count):
        out[to + i] = out[to + i] + sums[at + i] if added else sums[at + i]
