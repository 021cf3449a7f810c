"""Atomic operations on int64 words, for kernels that share memory.

Whoever writes a word with `store_release`, `add` or `set_bits` publishes all that it wrote before; whoever then reads
the word with `load_acquire`, `add` or `set_bits` sees it. All operations on words keep one order that all threads see.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.llvm import element_pointer

ORDER = "seq_cst"


@intrinsic
def load_acquire(typing_context, words, at):  # type: ignore[no-untyped-def]
    """words[at] of an int64 array."""
    sig = types.int64(words, at)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.load_atomic(element_pointer(context, builder, sig, args), ORDER, 8)

    return sig, generate


@intrinsic
def store_release(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] = value."""
    sig = types.void(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[2], element_pointer(context, builder, sig, args), ORDER, 8)
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def add(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] += value; what was there before."""
    sig = types.int64(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", element_pointer(context, builder, sig, args), args[2], ORDER)

    return sig, generate


@intrinsic
def set_bits(typing_context, words, at, bits):  # type: ignore[no-untyped-def]
    """words[at] |= bits; what was there before."""
    sig = types.int64(words, at, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("or", element_pointer(context, builder, sig, args), args[2], ORDER)

    return sig, generate
