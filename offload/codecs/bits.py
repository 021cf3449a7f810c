"""Bits and floats inside kernels: words at any byte, half floats, which numba cannot convert."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.floats import narrowed, widened
from csattn.cpu.llvm import element_pointer

FLOAT32, BFLOAT16, FLOAT16 = types.float32, types.uint16, types.int16  # as `csattn.cpu.floats` takes them
_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


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

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), generate


@intrinsic
def float_of_e4m3(typing_context, code):  # type: ignore[no-untyped-def]
    """The value of an e4m3, as float32: its bits are those of a float16 of 2 ** -8 times the value."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        wide = builder.zext(args[0], _I16)
        sign = builder.shl(builder.and_(wide, _I16(0x80)), _I16(8))
        bits = builder.or_(sign, builder.shl(builder.and_(wide, _I16(0x7F)), _I16(7)))
        return builder.fmul(builder.fpext(builder.bitcast(bits, _F16), _F32), _F32(256.0))

    return types.float32(types.uint8), generate


def _load(kind: types.Type) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return widened(builder, builder.load(_word(context, builder, sig, args, kind), align=1), kind)

    return generate


def _store(kind: types.Type) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.store(narrowed(builder, args[2], kind), _word(context, builder, sig, args, kind), align=1)
        return context.get_dummy_value()

    return generate


def _word(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, kind: types.Type) -> Any:
    return builder.bitcast(element_pointer(context, builder, sig, args), context.get_data_type(kind).as_pointer())
