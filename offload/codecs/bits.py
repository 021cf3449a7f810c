"""Bits and floats inside kernels: words at any byte, half floats, which numba cannot convert."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.floats import narrowed, widened
from csattn.cpu.llvm import Generate, by_elements, by_values

FLOAT32, BFLOAT16, FLOAT16 = types.float32, types.uint16, types.int16  # as `csattn.cpu.floats` takes them
_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_STORED = {FLOAT32: _F32, BFLOAT16: _I16, FLOAT16: _I16}


@intrinsic
def load_float32(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The float32 at byte `at` of an array of bytes."""
    return types.float32(memory, at), _load(FLOAT32)


@intrinsic
def load_float16(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The float16 at byte `at` of an array of bytes, as float32."""
    return types.float32(memory, at), _load(FLOAT16)


@intrinsic
def load_bfloat16(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The bfloat16 at byte `at` of an array of bytes, as float32."""
    return types.float32(memory, at), _load(BFLOAT16)


@intrinsic
def store_float32(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Write a float32 to byte `at` of an array of bytes and those behind it."""
    return types.void(memory, at, types.float32), _store(FLOAT32)


@intrinsic
def store_float16(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Write the nearest float16, ties to even."""
    return types.void(memory, at, types.float32), _store(FLOAT16)


@intrinsic
def store_bfloat16(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Write the nearest bfloat16, ties to even. Not for NaN."""
    return types.void(memory, at, types.float32), _store(BFLOAT16)


@intrinsic
def bits_of(typing_context, value):  # type: ignore[no-untyped-def]
    """A float32's bits as uint32."""
    return types.uint32(types.float32), by_values(lambda builder, value: builder.bitcast(value, _I32))


@intrinsic
def float_of(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""
    return types.float32(types.uint32), by_values(lambda builder, bits: builder.bitcast(bits, _F32))


@intrinsic
def float_of_e4m3(typing_context, code):  # type: ignore[no-untyped-def]
    """The value of an e4m3, as float32: its bits are those of a float16 of 2 ** -8 times the value."""

    def build(builder: ir.IRBuilder, code: Any) -> Any:
        wide = builder.zext(code, _I16)
        sign = builder.shl(builder.and_(wide, _I16(0x80)), _I16(8))
        bits = builder.or_(sign, builder.shl(builder.and_(wide, _I16(0x7F)), _I16(7)))
        return builder.fmul(builder.fpext(builder.bitcast(bits, _F16), _F32), _F32(256.0))

    return types.float32(types.uint8), by_values(build)


def _load(kind: types.Type) -> Generate:
    def build(builder: ir.IRBuilder, place: Any) -> Any:
        return widened(builder, builder.load(builder.bitcast(place, _STORED[kind].as_pointer()), align=1), kind)

    return by_elements(build)


def _store(kind: types.Type) -> Generate:
    def build(builder: ir.IRBuilder, place: Any, value: Any) -> None:
        builder.store(narrowed(builder, value, kind), builder.bitcast(place, _STORED[kind].as_pointer()), align=1)

    return by_elements(build)
