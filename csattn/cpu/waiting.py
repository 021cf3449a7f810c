"""Ways for a kernel to wait without the GIL, and its clock."""

import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csattn.cpu.jit import exact_kernel
from csattn.cpu.llvm import by_values, call

PAUSES = 64  # a few microseconds; then a waiting thread yields the core to others


@exact_kernel
def wait(turn: int) -> None:
    """Wait a moment; `turn` counts the moments in a row."""
    if turn < PAUSES:
        pause()
    else:
        yield_core()


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Hint to the core that this thread is spinning, so that its other hardware thread gets more of it."""
    sig = types.void()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        add_pause(builder, context.codegen().magic_tuple()[0])
        return context.get_dummy_value()

    return sig, generate


def add_pause(builder: ir.IRBuilder, triple: str) -> None:
    """Emit `pause` for the machine of an LLVM triple."""
    if triple.startswith(("x86_64", "i686")):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif triple.startswith(("aarch64", "arm64")):
        # isb, which flushes the pipeline: `yield` does nothing on most cores, so PAUSES of it would take no time
        call(builder, "llvm.aarch64.isb", ir.VoidType(), [ir.IntType(32)(15)])


@intrinsic
def yield_core(typing_context):  # type: ignore[no-untyped-def]
    """Yield this core to another thread, if one waits for it."""
    return types.void(), by_values(lambda builder: call(builder, "sched_yield", ir.IntType(32), []))


@intrinsic
def sleep_us(typing_context, duration_us):  # type: ignore[no-untyped-def]
    """Sleep at least that long."""
    return types.void(types.int32), by_values(lambda builder, us: call(builder, "usleep", ir.IntType(32), [us]))


@intrinsic
def now_ns(typing_context):  # type: ignore[no-untyped-def]
    """The monotonic clock in nanoseconds."""

    def build(builder: ir.IRBuilder) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(i64, 2))
        call(builder, "clock_gettime", i32, [i32(time.CLOCK_MONOTONIC), builder.bitcast(timespec, cgutils.voidptr_t)])
        seconds, nanoseconds = (builder.extract_value(builder.load(timespec), i) for i in (0, 1))
        return builder.add(builder.mul(seconds, i64(1_000_000_000)), nanoseconds)

    return types.int64(), by_values(build)
