"""Bits and floats inside kernels: memory at addresses, words at any byte, half floats, which numba cannot convert."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


# Numba forgets a cached kernel when its own file changes; what it calls, and compiles in, lies in this folder too.
_SOURCE_STAMP = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile when first called; every operation is rounded where it is written, the GIL is released."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for a cache: read-only site-packages and home
        return njit(**options)(function)  # type: ignore[no-any-return]
    _stamp(compiled)
    return compiled


def c_function(function: Callable[..., Any], signature: Any) -> CFunc:
    """Compile now to a function of C, cached like a kernel; whoever has its `address` has to keep it."""
    options = {"nogil": True, "error_model": "numpy"}
    compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
    with suppress(RuntimeError):  # no writable place for a cache
        compiled.enable_caching()
        _stamp(compiled)
    compiled.compile()
    return compiled


def _stamp(compiled: Any) -> None:
    index = compiled._cache._cache_file
    index._source_stamp = index._source_stamp, _SOURCE_STAMP


@intrinsic
def array_at(typing_context, address, length, like):  # type: ignore[no-untyped-def]
    """The array of `length` elements at an address; they are of the type of `like`."""
    sig = types.Array(like, 1, "C")(address, types.intp, like)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        array = context.make_array(sig.return_type)(context, builder)
        element = context.get_data_type(sig.return_type.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        data = builder.inttoptr(args[0], element.as_pointer())
        populate_array(array, data=data, shape=[args[1]], strides=[itemsize], itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return sig, generate


@intrinsic
def load_float32(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The float32 at byte `at` of an array of bytes."""
    return types.float32(memory, at), _load(_F32, lambda builder, value: value)


@intrinsic
def load_float16(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The float16 at byte `at` of an array of bytes, as float32."""
    return types.float32(memory, at), _load(_F16, lambda builder, value: builder.fpext(value, _F32))


@intrinsic
def load_bfloat16(typing_context, memory, at):  # type: ignore[no-untyped-def]
    """The bfloat16 at byte `at` of an array of bytes, as float32."""

    def widen(builder: ir.IRBuilder, value: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)

    return types.float32(memory, at), _load(_I16, widen)


@intrinsic
def store_float32(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Write a float32 to byte `at` of an array of bytes and those behind it."""
    return types.void(memory, at, types.float32), _store(_F32, lambda builder, value: value)


@intrinsic
def store_float16(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Likewise, the nearest float16, ties to even."""
    return types.void(memory, at, types.float32), _store(_F16, lambda builder, value: builder.fptrunc(value, _F16))


@intrinsic
def store_bfloat16(typing_context, memory, at, value):  # type: ignore[no-untyped-def]
    """Likewise, the nearest bfloat16, ties to even. Not for NaN."""

    def narrow(builder: ir.IRBuilder, value: Any) -> Any:
        bits = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        return builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16)), _I16)

    return types.void(memory, at, types.float32), _store(_I16, narrow)


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


def pointer_at(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, which: int) -> Any:
    """Where an element lies: args[which] is a contiguous array, the argument behind it the element's number."""
    data = context.make_array(sig.args[which])(context, builder, args[which]).data
    return builder.gep(data, [context.cast(builder, args[which + 1], sig.args[which + 1], types.intp)])


def _load(kind: ir.Type, widen: Callable[[ir.IRBuilder, Any], Any]) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return widen(builder, builder.load(_word(context, builder, sig, args, kind), align=1))

    return generate


def _store(kind: ir.Type, narrow: Callable[[ir.IRBuilder, Any], Any]) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.store(narrow(builder, args[2]), _word(context, builder, sig, args, kind), align=1)
        return context.get_dummy_value()

    return generate


def _word(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, kind: ir.Type) -> Any:
    return builder.bitcast(pointer_at(context, builder, sig, args, 0), kind.as_pointer())
