"""Floats of any width as vectors of 16 float32, sums of vectors in one fixed order, and the exponential."""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, lane_0, larger, smaller
from csattn.cpu.llvm import by_elements, by_values, shuffle
from csattn.cpu.simd import LANES, F32x16, I32x16, Vector, as_bits, fill

F32x4 = Vector(types.float32, 4)

_F32 = ir.FloatType()
ROUNDER = np.float32(12582912.0)  # 1.5 * 2 ** 23: adding and subtracting it rounds to the nearest integer


def widened(builder: ir.IRBuilder, value: Any, element: types.Type, lanes: int = 1) -> Any:
    """Convert what was loaded from an array of that element type (see `csattn.cpu.addresses.KINDS`) to float32."""

    def kind(scalar: ir.Type) -> ir.Type:
        return ir.VectorType(scalar, lanes) if lanes > 1 else scalar

    if element == types.float32:
        return value
    if element == types.int16:
        return builder.fpext(builder.bitcast(value, kind(ir.HalfType())), kind(_F32))
    wide = kind(ir.IntType(32))
    shift = ir.Constant(wide, [16] * lanes) if lanes > 1 else wide(16)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), kind(_F32))


def narrowed(builder: ir.IRBuilder, value: Any, element: types.Type) -> Any:
    """Convert a float32 to the nearest float of that element type, ties to even. Not for NaN."""
    if element == types.float32:
        return value
    i16, i32 = ir.IntType(16), ir.IntType(32)
    if element == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), i16)
    bits = builder.bitcast(value, i32)
    odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
    return builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, i32(0x7FFF))), i32(16)), i16)


@intrinsic
def load_floats(typing_context, array, start):  # type: ignore[no-untyped-def]
    """Elements start, start + 1, ... start + 15 of a contiguous array as float32."""
    return F32x16(array, start), by_elements(partial(_load_widened, array.dtype, LANES))


@intrinsic
def load_floats_of(typing_context, vector, array, start):  # type: ignore[no-untyped-def]
    """Like `load_floats`, for as many elements as the given vector type of float32 has lanes."""

    def build(builder: ir.IRBuilder, place: Any, _: Any) -> Any:
        return _load_widened(array.dtype, vector.instance_type.lanes, builder, place)

    return vector.instance_type(vector, array, start), by_elements(build, 1)


def _load_widened(element: types.Type, lanes: int, builder: ir.IRBuilder, place: Any) -> Any:
    stored = ir.VectorType(place.type.pointee, lanes)
    return widened(builder, builder.load(builder.bitcast(place, stored.as_pointer()), align=1), element, lanes)


@intrinsic
def load_float(typing_context, array, at):  # type: ignore[no-untyped-def]
    """One element of a contiguous array as float32."""
    sig = types.float32(array, at)
    return sig, by_elements(lambda builder, place: widened(builder, builder.load(place), array.dtype))


@intrinsic
def store_float(typing_context, array, at, value):  # type: ignore[no-untyped-def]
    """array[at] = value, rounded to the nearest float that the array holds, ties to even."""

    def build(builder: ir.IRBuilder, place: Any, value: Any) -> None:
        builder.store(narrowed(builder, value, array.dtype), place)

    return types.void(array, at, types.float32), by_elements(build)


@intrinsic
def _pair_sums(typing_context, a, b, distance):  # type: ignore[no-untyped-def]
    """Sums of lanes `distance` (a literal power of two) apart: of a in lanes whose number has that bit 0, else of b."""
    if not isinstance(distance, types.IntegerLiteral):
        return None
    bit, lanes = distance.literal_value, a.lanes
    low = [lanes + (i ^ bit) if i & bit else i for i in range(lanes)]
    high = [lanes + i if i & bit else i | bit for i in range(lanes)]

    def build(builder: ir.IRBuilder, a: Any, b: Any, _: Any) -> Any:
        return builder.fadd(shuffle(builder, (a, b), low), shuffle(builder, (a, b), high))

    return a(a, b, distance), by_values(build)


@exact_kernel
def sums_of_4(a, b, c, d):  # type: ignore[no-untyped-def]
    """Reduce four vectors twice: lane i holds a partial sum of vector i % 4. `sums_of_16` takes four of these.

    Every four lanes are reduced on their own, so vectors may be processed in parts.
    """
    return _pair_sums(_pair_sums(a, b, 1), _pair_sums(c, d, 1), 2)


@exact_kernel
def sums_of_16(a, b, c, d):  # type: ignore[no-untyped-def]
    """The sums over the lanes of 16 vectors, which come as four results of `sums_of_4`: lane i has that of vector i.

    The order of summation is fixed.
    """
    return _pair_sums(_pair_sums(a, b, 4), _pair_sums(c, d, 4), 8)


@exact_kernel
def exp_lanes(x):  # type: ignore[no-untyped-def]
    """e ** x within 2 ulp for x up to 88; nearly 0 below -87; NaN for NaN."""
    clipped = smaller(fill(F32x16, 88.5), larger(fill(F32x16, -87.5), x))  # x is second, so that NaN stays NaN
    shifted = fma(clipped, fill(F32x16, 1.4426950408889634), fill(F32x16, ROUNDER))
    whole = shifted - fill(F32x16, ROUNDER)
    rest = fma(whole, fill(F32x16, -0.693145751953125), clipped)
    rest = fma(whole, fill(F32x16, -1.428606765330187e-06), rest)
    power = fma(fill(F32x16, 1.9875691500e-4), rest, fill(F32x16, 1.3981999507e-3))
    power = fma(power, rest, fill(F32x16, 8.3334519073e-3))
    power = fma(power, rest, fill(F32x16, 4.1665795894e-2))
    power = fma(power, rest, fill(F32x16, 1.6666665459e-1))
    power = fma(power, rest, fill(F32x16, 5.0000001201e-1))
    power = fma(power, rest * rest, rest) + fill(F32x16, 1.0)
    exponent = as_bits(I32x16, shifted) << fill(I32x16, 23)
    return as_bits(F32x16, as_bits(I32x16, power) + exponent)


@exact_kernel
def sum_of(vector):  # type: ignore[no-untyped-def]
    """The sum of the lanes, in the order of `sums_of_16`."""
    four = sums_of_4(vector, vector, vector, vector)
    return lane_0(sums_of_16(four, four, four, four))
