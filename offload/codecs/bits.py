"""Unaligned loads and stores of floats for numba kernels, and conversions of half floats, which numba lacks."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.floats import narrowed, widened
from csattn.cpu.llvm import by_elements, by_values

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


@intrinsic
def read_float(typing_context, memory, at, like):  # type: ignore[no-untyped-def]
    """Return the float at byte `at` of an array of bytes, as float32. like: one of `csattn.cpu.addresses.KINDS`."""

    def build(builder: ir.IRBuilder, place: Any, _: Any) -> Any:
        return widened(builder, builder.load(_place_of(builder, place, like), align=1), like)

    return types.float32(memory, at, like), by_elements(build)


@intrinsic
def write_float(typing_context, memory, at, like, value):  # type: ignore[no-untyped-def]
    """Write `value`, rounded to the kind of `like` with ties to even, from byte `at` on. For bfloat16, no NaN."""

    def build(builder: ir.IRBuilder, place: Any, _: Any, value: Any) -> None:
        builder.store(narrowed(builder, value, like), _place_of(builder, place, like), align=1)

    return types.void(memory, at, like, types.float32), by_elements(build)


@intrinsic
def bits_of(typing_context, value):  # type: ignore[no-untyped-def]
    """Return a float32's bits as uint32."""
    return types.uint32(types.float32), by_values(lambda builder, value: builder.bitcast(value, _I32))


@intrinsic
def float_of(typing_context, bits):  # type: ignore[no-untyped-def]
    """Return the float32 with these bits."""
    return types.float32(types.uint32), by_values(lambda builder, bits: builder.bitcast(bits, _F32))


@intrinsic
def float_of_e4m3(typing_context, code):  # type: ignore[no-untyped-def]
    """Return the value of an e4m3 as float32: its bits, shifted, are the float16 of 2 ** -8 times the value."""

    def build(builder: ir.IRBuilder, code: Any) -> Any:
        wide = builder.zext(code, _I16)
        sign = builder.shl(builder.and_(wide, _I16(0x80)), _I16(8))
        bits = builder.or_(sign, builder.shl(builder.and_(wide, _I16(0x7F)), _I16(7)))
        return builder.fmul(builder.fpext(builder.bitcast(bits, _F16), _F32), _F32(256.0))

    return types.float32(types.uint8), by_values(build)


def _place_of(builder: ir.IRBuilder, place: Any, like: types.Type) -> Any:
    return builder.bitcast(place, (_F32 if like == types.float32 else _I16).as_pointer())
