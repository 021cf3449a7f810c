"""Helpers for writing intrinsics: code from values or from pointers to elements, calls by name, shuffles."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

Generate = Callable[[Any, ir.IRBuilder, Any, Any], Any]  # what an intrinsic returns with its signature


def by_values(build: Callable[..., Any]) -> Generate:
    """The code generator of an intrinsic: `build` gets the builder and the values of all arguments."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        result = build(builder, *args)
        return context.get_dummy_value() if sig.return_type == types.void else result

    return generate


def by_elements(build: Callable[..., Any], *arrays: int) -> Generate:
    """The code generator of an intrinsic: `build` gets the builder, pointers to elements, and the other values.

    arrays: indices of the arguments that are contiguous arrays; the argument after each is the element's index.
    Default: the first argument.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        which = arrays or (0,)
        places = [element_pointer(context, builder, sig, args, array) for array in which]
        others = [arg for i, arg in enumerate(args) if i not in which and i - 1 not in which]
        return by_values(build)(context, builder, sig, [*places, *others])

    return generate


def element_pointer(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, which: int = 0) -> Any:
    """A pointer to an element: args[which] is a contiguous array, and the argument after it the element's index."""
    data = context.make_array(sig.args[which])(context, builder, args[which]).data
    return builder.gep(data, [context.cast(builder, args[which + 1], sig.args[which + 1], types.intp)])


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def shuffle(builder: ir.IRBuilder, args: Any, order: list[int]) -> Any:
    """Select lanes of the concatenation of two vectors, in that order."""
    return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))
