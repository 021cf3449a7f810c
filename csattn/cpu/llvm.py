"""What intrinsics are made of: places of elements, calls of functions by their names, shuffles."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils


def element_pointer(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, which: int = 0) -> Any:
    """Where an element lies: args[which] is a contiguous array, the argument behind it the element's number."""
    data = context.make_array(sig.args[which])(context, builder, args[which]).data
    return builder.gep(data, [context.cast(builder, args[which + 1], sig.args[which + 1], types.intp)])


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def shuffle(builder: ir.IRBuilder, args: Any, order: list[int]) -> Any:
    """The lanes of two vectors, one behind the other, in that order."""
    return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))
