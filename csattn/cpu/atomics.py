"""Atomic operations on int64 words, for kernels that share memory.

A thread that writes a word with `store_release`, `add` or `set_bits` publishes everything that it wrote before. If
another then reads the word with `load_acquire`, `add` or `set_bits`, it sees all of that. All operations are
sequentially consistent: they have one order, which all threads see.
"""

from numba import types
from numba.extending import intrinsic

from csattn.cpu.llvm import by_elements

ORDER = "seq_cst"


@intrinsic
def load_acquire(typing_context, words, at):  # type: ignore[no-untyped-def]
    """Return words[at] of an int64 array."""
    return types.int64(words, at), by_elements(lambda builder, word: builder.load_atomic(word, ORDER, 8))


@intrinsic
def store_release(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] = value."""
    sig = types.void(words, at, types.int64)
    return sig, by_elements(lambda builder, word, value: builder.store_atomic(value, word, ORDER, 8))


@intrinsic
def add(typing_context, words, at, value):  # type: ignore[no-untyped-def]
    """words[at] += value; return the value before."""
    sig = types.int64(words, at, types.int64)
    return sig, by_elements(lambda builder, word, value: builder.atomic_rmw("add", word, value, ORDER))


@intrinsic
def set_bits(typing_context, words, at, bits):  # type: ignore[no-untyped-def]
    """words[at] |= bits; return the value before."""
    sig = types.int64(words, at, types.int64)
    return sig, by_elements(lambda builder, word, bits: builder.atomic_rmw("or", word, bits, ORDER))
