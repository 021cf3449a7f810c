"""A linear layer as a stage of a tape: a piece is one or more groups of 16 outputs, for all rows."""

from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import number_at, word_of, words_at
from csattn.cpu.floats import exp_lanes, load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger
from csattn.cpu.simd import LANES, F32x16, fill, load, store
from csattn.models.spec import Activation
from workers.model.cpu.linear import TILE
from workers.model.cpu.quantized_products import multiply

# Arguments of the stage: sizes and addresses, of float32 arrays unless stated otherwise.
LINEAR = (
    "num_rows",  # address of an int64
    "x",  # [num_rows, num_in]
    "num_in",
    "format",  # of both weights, an index of FORMATS
    "group_size",  # of quantized weights
    "weight",  # [num_out, num_in] of the weights' dtype, or a `QuantizedWeight`'s words
    "scales",  # a `QuantizedWeight`'s scales, or 0
    "bias",  # [num_out] of the weights' dtype, or 0
    "activation",  # an index of ACTIVATIONS
    "up_weight",  # like weight, or 0: the activated product is multiplied by this matrix's product
    "up_scales",
    "up_bias",
    "num_out",
    "groups",  # of 16 outputs in a piece
    "out",  # [num_rows, out_width]
    "out_width",
    "multiplier",  # address of a float64: out += multiplier * product; 0: out = product
)
_linear_at = words_at(LINEAR)
ACTIVATIONS: tuple[Activation | None, ...] = (None, *get_args(Activation))
MAX_GROUPS, PIECES_OF_THREAD = 16, 4
NONE, SILU, GELU_TANH, QUICK_GELU, RELU, RELU2, CLAMPED, LIMITED = range(8)


def num_groups(num_out: int) -> int:
    """Return the number of groups of 16 outputs."""
    return -(-num_out // LANES)


def groups_of_piece(num_out: int, num_threads: int) -> int:
    """Return how many groups of outputs make a piece.

    Weights are prefetched within a piece, so it has many groups, but few enough that every thread gets several pieces.
    """
    return max(1, min(MAX_GROUPS, num_groups(num_out) // (PIECES_OF_THREAD * num_threads)))


def linear_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """like: an element of the biases and of weights that are not quantized; x and out are float32."""
    args = _linear_at(arguments)
    begin = piece * args.groups * LANES
    for first in range(begin, min(begin + args.groups * LANES, args.num_out), LANES):
        _write_group(args, first, like)
    return 0


@exact_kernel
def _write_group(args, first, like):  # type: ignore[no-untyped-def]
    """Compute outputs first to first + 15, or up to the last one, for all rows."""
    num_rows = word_of(args.num_rows, 0)
    num_in, num_out, width = args.num_in, args.num_out, args.out_width
    count = min(LANES, num_out - first)
    x = array_at(args.x, num_rows * num_in, np.float32(0))
    out = array_at(args.out, num_rows * width, np.float32(0))
    size = (num_rows + TILE) * LANES
    sums = np.empty(size, np.float32)
    format, group_size = args.format, args.group_size
    multiply(
        x, num_rows, format, group_size, args.weight, args.scales, num_out, num_in, first, count, num_in, like, sums
    )
    if args.bias != 0:
        _add_bias(sums, num_rows, array_at(args.bias, num_out, like), first, count)
    if args.activation != NONE:
        factors = np.empty(size, np.float32)
        if args.up_weight != 0:
            multiply(
                x, num_rows, format, group_size, args.up_weight, args.up_scales, num_out, num_in, first, count, num_in,
                like, factors,
            )  # fmt: skip
            if args.up_bias != 0:
                _add_bias(factors, num_rows, array_at(args.up_bias, num_out, like), first, count)
        else:
            factors[:] = 1.0
        for row in range(num_rows):
            activate(args.activation, sums, factors, row * LANES, count)
    for row in range(num_rows):
        _write(sums, row * LANES, out, row * width + first, count, args.multiplier)


@exact_kernel
def _add_bias(sums: NDArray[np.float32], num_rows: int, bias: Any, first: int, count: int) -> None:
    for row in range(num_rows):
        for i in range(count):
            sums[row * LANES + i] += load_float(bias, first + i)


@exact_kernel
def activate(kind: int, x: NDArray[np.float32], factors: NDArray[np.float32], at: int, count: int) -> None:
    """x = activation(x) * factors"""
    for i in range(count, LANES):
        x[at + i], factors[at + i] = 0.0, 0.0
    value, factor, zero = load(F32x16, x, at), load(F32x16, factors, at), fill(F32x16, 0.0)
    if kind in (RELU, RELU2):
        value = larger(zero, value)  # NaN stays NaN
        store(x, at, value * (value * factor if kind == RELU2 else factor))
        return
    if kind in (CLAMPED, LIMITED):
        is_clamped = kind == CLAMPED
        least, more = fill(F32x16, -7.0 if is_clamped else -10.0), fill(F32x16, 1.0 if is_clamped else 0.0)
        value = zero - larger(least, zero - value)  # NaN stays NaN
        factor = more + larger(least, zero - larger(least, zero - factor))
    inner = value  # x * factor * sigmoid(inner)
    if kind == GELU_TANH:
        inner = fill(F32x16, 1.5957691216057308) * fma(fill(F32x16, 0.044715) * value, value * value, value)
    elif kind in (QUICK_GELU, CLAMPED):
        inner = fill(F32x16, 1.702) * value
    powers = np.empty(LANES, np.float32)
    store(powers, 0, exp_lanes(zero - inner))
    store(x, at, value * factor)
    for i in range(count):
        x[at + i] /= np.float32(1.0) + powers[i]


@exact_kernel
def _write(sums: NDArray[np.float32], at: int, out: NDArray[np.float32], to: int, count: int, multiplier: int) -> None:
    """Write `count` sums to out, or add them times the float64 at the address `multiplier`, if that is not 0."""
    times = np.float32(1.0) if multiplier == 0 else number_at(multiplier)
    if count == LANES:
        value = load(F32x16, sums, at)
        if multiplier != 0:
            value = fma(fill(F32x16, times), value, load(F32x16, out, to))
        store(out, to, value)
        return
    for i in range(count):
        out[to + i] = out[to + i] + times * sums[at + i] if multiplier != 0 else sums[at + i]
