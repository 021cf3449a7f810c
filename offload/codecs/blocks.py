"""Encode and decode Q8_0, Q4_0 and e4m3, a vector of values at a time, in LLVM vector types, for any machine."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.llvm import by_elements, call, shuffle
from csattn.cpu.simd import LANES

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_HALF = list(range(16))  # the first half of 32 lanes


def _vector(scalar: ir.Type, lanes: int = 32) -> ir.VectorType:
    return ir.VectorType(scalar, lanes)


def _splat(builder: ir.IRBuilder, value: Any, lanes: int = 32) -> Any:
    one = builder.insert_element(ir.Constant(_vector(value.type, lanes), ir.Undefined), value, _I32(0))
    return shuffle(builder, (one, one), [0] * lanes)


def _same(scalar: ir.Type, value: float, lanes: int = 32) -> ir.Constant:
    return ir.Constant(_vector(scalar, lanes), [value] * lanes)


def _write_scaled(builder: ir.IRBuilder, q: Any, d: Any, to: Any) -> None:
    """Store the integers q times d at `to`, as float32."""
    values = builder.fmul(builder.sitofp(q, _vector(_F32, q.type.count)), _splat(builder, d, q.type.count))
    builder.store(values, builder.bitcast(to, values.type.as_pointer()), align=4)


@intrinsic
def decode_q8_0(typing_context, coded, at, out, first):  # type: ignore[no-untyped-def]
    """out[first : first + 32] = the block at byte `at`."""

    def build(builder: ir.IRBuilder, block: Any, to: Any) -> None:
        d = builder.load(builder.bitcast(block, _F16.as_pointer()), align=1)
        codes = builder.bitcast(builder.gep(block, [_I64(2)]), _vector(_I8).as_pointer())
        _write_scaled(builder, builder.load(codes, align=1), builder.fpext(d, _F32), to)

    return types.void(coded, at, out, first), by_elements(build, 0, 2)


@intrinsic
def decode_q4_0(typing_context, coded, at, out, first):  # type: ignore[no-untyped-def]
    """out[first : first + 32] = the block at byte `at`."""

    def build(builder: ir.IRBuilder, block: Any, to: Any) -> None:
        d = builder.load(builder.bitcast(block, _F16.as_pointer()), align=1)
        codes = builder.bitcast(builder.gep(block, [_I64(2)]), _vector(_I8, 16).as_pointer())
        pairs = builder.load(codes, align=1)
        low = builder.and_(pairs, _same(_I8, 15, 16))
        high = builder.lshr(pairs, _same(_I8, 4, 16))
        q = builder.sub(shuffle(builder, (low, high), list(range(32))), _same(_I8, 8))
        _write_scaled(builder, q, builder.fpext(d, _F32), to)

    return types.void(coded, at, out, first), by_elements(build, 0, 2)


@intrinsic
def decode_e4m3(typing_context, coded, at, out, first, d):  # type: ignore[no-untyped-def]
    """out[first : first + 16] = the codes from byte `at` on, times d: see `float_of_e4m3`."""

    def build(builder: ir.IRBuilder, place: Any, to: Any, d: Any) -> None:
        codes = builder.bitcast(place, _vector(_I8, LANES).as_pointer())
        wide = builder.zext(builder.load(codes, align=1), _vector(_I16, LANES))
        sign = builder.shl(builder.and_(wide, _same(_I16, 0x80, LANES)), _same(_I16, 8, LANES))
        rest = builder.shl(builder.and_(wide, _same(_I16, 0x7F, LANES)), _same(_I16, 7, LANES))
        halves = builder.bitcast(builder.or_(sign, rest), _vector(_F16, LANES))
        values = builder.fmul(builder.fpext(halves, _vector(_F32, LANES)), _same(_F32, 256.0, LANES))
        values = builder.fmul(values, _splat(builder, d, LANES))
        builder.store(values, builder.bitcast(to, values.type.as_pointer()), align=4)

    return types.void(coded, at, out, first, types.float32), by_elements(build, 0, 2)


def _load_block(builder: ir.IRBuilder, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _vector(_F32).as_pointer()), align=4)


@intrinsic
def largest_of_block(typing_context, x, first):  # type: ignore[no-untyped-def]
    """Return the value of x[first : first + 32] with the largest magnitude; the first on ties. All are finite."""

    def build(builder: ir.IRBuilder, block: Any) -> Any:
        values = _load_block(builder, block)
        absolute = call(builder, "llvm.fabs.v32f32", values.type, [values])
        largest = call(builder, "llvm.vector.reduce.fmax.v32f32", _F32, [absolute])
        hits = builder.bitcast(builder.fcmp_ordered("==", absolute, _splat(builder, largest)), _I32)
        return builder.extract_element(values, builder.cttz(hits, _I1(1)))

    return types.float32(x, first), by_elements(build)


@intrinsic
def write_q8_0(typing_context, x, first, coded, at, inverse):  # type: ignore[no-untyped-def]
    """Write 32 bytes from `at` on: x[first : first + 32] * inverse, rounded to nearest, ties away from zero."""

    def build(builder: ir.IRBuilder, block: Any, to: Any, inverse: Any) -> None:
        scaled = builder.fmul(_load_block(builder, block), _splat(builder, inverse))
        q = builder.fptosi(call(builder, "llvm.round.v32f32", scaled.type, [scaled]), _vector(_I32))
        builder.store(builder.trunc(q, _vector(_I8)), builder.bitcast(to, _vector(_I8).as_pointer()), align=1)

    return types.void(x, first, coded, at, types.float32), by_elements(build, 0, 2)


@intrinsic
def write_q4_0(typing_context, x, first, coded, at, inverse):  # type: ignore[no-untyped-def]
    """Write 16 bytes from `at` on: min(15, x[first : first + 32] * inverse + 8.5), truncated, two in a byte."""

    def build(builder: ir.IRBuilder, block: Any, to: Any, inverse: Any) -> None:
        scaled = builder.fmul(_load_block(builder, block), _splat(builder, inverse))
        q = builder.fptosi(builder.fadd(scaled, _same(_F32, 8.5)), _vector(_I32))
        most = _same(_I32, 15)
        codes = builder.trunc(builder.select(builder.icmp_signed("<", q, most), q, most), _vector(_I8))
        low = shuffle(builder, (codes, codes), _HALF)
        high = builder.shl(shuffle(builder, (codes, codes), [16 + i for i in _HALF]), _same(_I8, 4, 16))
        builder.store(builder.or_(low, high), builder.bitcast(to, _vector(_I8, 16).as_pointer()), align=1)

    return types.void(x, first, coded, at, types.float32), by_elements(build, 0, 2)
