"""How threads wait for work without the GIL: words that they share with whoever has some, and how long they look.

Whoever has work puts a number of its own, above 0, into the word OPENED; threads that join it count themselves in and
out at INSIDE. What the work is they find elsewhere.
"""

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from csattn.cpu.atomics import add, load_acquire
from csattn.cpu.jit import exact_kernel
from csattn.cpu.llvm import call

LINE = 8  # words of a cache line: each shared word has one to itself
OPENED = 0 * LINE  # number of the work that may be joined, 0: none
INSIDE = 1 * LINE  # threads that have joined
STOPPED = 2 * LINE  # nothing will come any more
NUM_WAITING_WORDS = 3 * LINE

IDLE, CLOSED = 0, -1  # what is waited for in vain
PAUSES = 64  # a few microseconds: waiting any longer, a thread lets others have the core
NAP_US = 50


@exact_kernel
def await_work(words: NDArray[np.int64], last_number: int, spin_ns: int, nap_ns: int) -> int:
    """Join the next work, but for that of `last_number`, and return its number; or IDLE, or CLOSED.

    While nothing comes, look for spin_ns without a rest, then every NAP_US; IDLE after nap_ns. Who has joined leaves
    with `leave_work`.
    """
    turn, since = 0, now_ns()
    while load_acquire(words, STOPPED) == 0:
        number: int = load_acquire(words, OPENED)
        if number != 0 and number != last_number:
            add(words, INSIDE, 1)
            if load_acquire(words, OPENED) == number:
                return number
            leave_work(words)  # it was closed meanwhile
        turn += 1
        pause()
        if turn % PAUSES == 0:
            waited_ns = now_ns() - since
            if waited_ns > nap_ns:
                return IDLE
            if waited_ns > spin_ns:
                sleep_us(NAP_US)
            else:
                yield_core()
    return CLOSED


@exact_kernel
def leave_work(words: NDArray[np.int64]) -> None:
    add(words, INSIDE, -1)


@exact_kernel
def await_leave(words: NDArray[np.int64]) -> None:
    """Wait until no thread is inside: only then may what it has read change."""
    turn = 0
    while load_acquire(words, INSIDE) > 0:
        wait(turn)
        turn += 1


@exact_kernel
def wait(turn: int) -> None:
    """A moment, the turn-th in a row."""
    if turn < PAUSES:
        pause()
    else:
        yield_core()


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that its thread does nothing but wait: it then leaves more to the other thread of the core."""
    sig = types.void()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i686")):
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif triple.startswith(("aarch64", "arm64")):
            call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def yield_core(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread have this core, if one waits for it."""
    sig = types.void()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        call(builder, "sched_yield", ir.IntType(32), [])
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def sleep_us(typing_context, duration_us):  # type: ignore[no-untyped-def]
    """Sleep at least that long."""
    sig = types.void(types.int32)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        call(builder, "usleep", ir.IntType(32), list(args))
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def now_ns(typing_context):  # type: ignore[no-untyped-def]
    """A clock that never goes back."""
    sig = types.int64()

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(i64, 2))
        call(builder, "clock_gettime", i32, [i32(time.CLOCK_MONOTONIC), builder.bitcast(timespec, cgutils.voidptr_t)])
        seconds, nanoseconds = (builder.extract_value(builder.load(timespec), i) for i in (0, 1))
        return builder.add(builder.mul(seconds, i64(1_000_000_000)), nanoseconds)

    return sig, generate
