"""Arrays and functions that kernels get by address. Functions of four numbers are called stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, typeof, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from csattn.cpu.jit import c_function, is_missing
from csattn.cpu.llvm import by_values


@dataclass(frozen=True, slots=True)
class KindStage:
    """A stage for arrays of one kind of floats. The type of its fourth argument is that kind; its value is unused."""

    function: Callable[[int, int, int, Any], int]
    kind: str  # of KINDS


Stage = Callable[[int, int, int, int], int] | KindStage  # int64 throughout
_COMPILED: dict[Stage, Any] = {}  # keeps compiled code from being freed

# By torch's names. Arrays of bfloat16 are passed as uint16, arrays of float16 as int16: numba has a type for neither.
KINDS: dict[str, Any] = {"float32": np.float32(0), "bfloat16": np.uint16(0), "float16": np.int16(0)}
LINE_BYTES = 64  # of a cache line


@cache
def compiled_address(stage: Stage) -> int:
    """The address of the compiled function, for the life of the process. Compiles it on the first call."""
    _COMPILED[stage] = compiled = c_function(*_typed(stage))
    return int(compiled.address)


def is_uncached(stage: Stage) -> bool:
    """Whether the first call of `compiled_address` would compile the stage, and keep it for other processes."""
    return stage not in _COMPILED and is_missing(*_typed(stage))


def _typed(stage: Stage) -> tuple[Callable[..., int], Any]:
    function, fourth = (
        (stage.function, typeof(KINDS[stage.kind])) if isinstance(stage, KindStage) else (stage, types.int64)
    )
    return function, types.int64(types.int64, types.int64, types.int64, fourth)


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised bytes that begin at a cache line."""
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes]


@intrinsic
def call_stage(typing_context, function, a, b, c, d):  # type: ignore[no-untyped-def]
    """Call the stage at the address `function` and return its result."""
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 4)

    def build(builder: ir.IRBuilder, function: Any, *args: Any) -> Any:
        return builder.call(builder.inttoptr(function, kind.as_pointer()), args)

    return types.int64(*[types.int64] * 5), by_values(build)


@intrinsic
def array_at(typing_context, address, length, like):  # type: ignore[no-untyped-def]
    """The array at an address, of `length` elements of the type of `like`."""
    sig = types.Array(like, 1, "C")(address, types.intp, like)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        array = context.make_array(sig.return_type)(context, builder)
        element = context.get_data_type(sig.return_type.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        data = builder.inttoptr(args[0], element.as_pointer())
        populate_array(array, data=data, shape=[args[1]], strides=[itemsize], itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return sig, generate


def record_at(dtype: np.dtype[np.void]) -> Any:
    """Make a function for kernels that returns the record of this dtype at an address."""

    @intrinsic
    def at(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return from_dtype(dtype)(address), generate

    return at
