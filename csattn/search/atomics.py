"""What kernels that share memory need: arrays at addresses, atomic operations on int64 words, ways to wait.

Whoever writes a word with `store_release`, `add` or `set_bits` publishes all that it wrote before; whoever then reads
the word with `load_acquire`, `add` or `set_bits` sees it. All operations on words keep one order that all threads see.
"""

import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from csattn.search.simd import element_pointer

ORDER = "seq_cst"


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
def call_stage(typing_context, function, search, scratch, job, piece):  # type: ignore[no-untyped-def]
    """What the stage at that address returns (see `stage`)."""
    i64 = types.int64
    sig = i64(i64, i64, i64, i64, i64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        kind = ir.FunctionType(i64, [i64] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return sig, generate


@intrinsic
def load_acquire(typing_context, words, at):  # type: ignore[no-untyped-def]
    """words[at] of an int64 array."""
    sig = types.int64(words, at)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, sig, args), ORDER, 8)

    return sig, generate


@intrinsic
def store_release(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] = value."""
    sig = types.void(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(context, builder, sig, args), ORDER, 8)
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def add(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] += value; what was there before."""
    sig = types.int64(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(context, builder, sig, args), args[2], ORDER)

    return sig, generate


@intrinsic
def set_bits(typing_context, words, at, bits):  # type: ignore[no-untyped-def]
    """words[at] |= bits; what was there before."""
    sig = types.int64(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("or", _word(context, builder, sig, args), args[2], ORDER)

    return sig, generate


def _word(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
    return element_pointer(context, builder, sig.args[0], args[0], args[1], sig.args[1])


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that its thread does nothing but wait: it then leaves more to the other thread of the core."""
    sig = types.void()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i686")):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif triple.startswith(("aarch64", "arm64")):
            _call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def yield_core(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread have this core, if one waits for it."""
    sig = types.void()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _call(builder, "sched_yield", ir.IntType(32), [])
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def sleep_us(typing_context, duration_us):  # type: ignore[no-untyped-def]
    """Sleep at least that long."""
    sig = types.void(types.int32)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _call(builder, "usleep", ir.IntType(32), list(args))
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def now_ns(typing_context):  # type: ignore[no-untyped-def]
    """A clock that never goes back."""
    sig = types.int64()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(i64, 2))
        _call(builder, "clock_gettime", i32, [i32(time.CLOCK_MONOTONIC), builder.bitcast(timespec, cgutils.voidptr_t)])
        seconds, nanoseconds = (builder.extract_value(builder.load(timespec), i) for i in (0, 1))
        return builder.add(builder.mul(seconds, i64(1_000_000_000)), nanoseconds)

    return sig, generate


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)
