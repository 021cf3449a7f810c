"""Vectors as values inside kernels: `a = load(I32x16, x, i)`, `a * b + c`, `store(x, i, a)`; see also `lanes.py`.

These are LLVM's vector types, so the code runs on any machine: vectors wider than its registers are split. Only
`byte_lanes` and `lanes` (`pack_lanes`, `add_expanded`) use instructions of particular machines. Loads and stores need
no alignment and check no bounds. Integers wrap around; floats are rounded after each operation.
"""

import operator
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model, typeof_impl

from csattn.cpu.llvm import Generate, by_elements, by_values, call, shuffle


class Vector(types.Type):  # type: ignore[misc]
    """A fixed number of scalars of one type."""

    def __init__(self, element: types.Type, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"Vector({element}, {lanes})")

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, types.Float)

    def llvm_type(self) -> ir.VectorType:
        if self.is_float:
            scalar = ir.FloatType() if self.element.bitwidth == 32 else ir.DoubleType()
        else:
            scalar = ir.IntType(self.element.bitwidth)
        return ir.VectorType(scalar, self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type())


@typeof_impl.register(Vector)  # type: ignore[untyped-decorator]
def _typeof_vector_type(vector: Vector, _context: Any) -> types.TypeRef:
    return types.TypeRef(vector)


LANES = 16  # of the vectors that kernels use most
U16x16 = Vector(types.uint16, 16)
U16x32 = Vector(types.uint16, 32)
I32x16 = Vector(types.int32, 16)
F32x16 = Vector(types.float32, 16)
F64x16 = Vector(types.float64, 16)
# Kernels that hold sixteen or more vectors at a time use narrower ones on machines with 32 registers of four lanes
TILE_LANES = 4 if platform.machine() in ("aarch64", "arm64") else LANES
I32xTile = Vector(types.int32, TILE_LANES)
F32xTile = Vector(types.float32, TILE_LANES)


def _define_arithmetic(op: Callable[[Any, Any], Any], build: Callable[[ir.IRBuilder, Vector, Any, Any], Any]) -> None:
    """Define the operator `op` for two vectors of one type."""

    @infer_global(op)
    class _Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(op, Vector, Vector)  # type: ignore[untyped-decorator]
    def _lower(_context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return build(builder, sig.args[0], *args)


for _op, _in_place, _build in (
    (operator.add, operator.iadd, lambda ir_, v, a, b: ir_.fadd(a, b) if v.is_float else ir_.add(a, b)),
    (operator.sub, operator.isub, lambda ir_, v, a, b: ir_.fsub(a, b) if v.is_float else ir_.sub(a, b)),
    (operator.mul, operator.imul, lambda ir_, v, a, b: ir_.fmul(a, b) if v.is_float else ir_.mul(a, b)),
    (operator.truediv, operator.itruediv, lambda ir_, v, a, b: ir_.fdiv(a, b)),
    (operator.and_, operator.iand, lambda ir_, v, a, b: ir_.and_(a, b)),
    (operator.or_, operator.ior, lambda ir_, v, a, b: ir_.or_(a, b)),
    (operator.xor, operator.ixor, lambda ir_, v, a, b: ir_.xor(a, b)),
    (operator.lshift, operator.ilshift, lambda ir_, v, a, b: ir_.shl(a, b)),
    (operator.rshift, operator.irshift, lambda ir_, v, a, b: ir_.ashr(a, b) if v.element.signed else ir_.lshr(a, b)),
):
    _define_arithmetic(_op, _build)
    _define_arithmetic(_in_place, _build)


@intrinsic
def load(typing_context, vector, array, start):  # type: ignore[no-untyped-def]
    """Load elements start, start + 1, ... of a contiguous array as a vector; the array's bytes are reinterpreted."""
    pointer = vector.instance_type.llvm_type().as_pointer()

    def build(builder: ir.IRBuilder, place: Any, _: Any) -> Any:
        return builder.load(builder.bitcast(place, pointer), align=1)

    return vector.instance_type(vector, array, start), by_elements(build, 1)


@intrinsic
def store(typing_context, array, start, value):  # type: ignore[no-untyped-def]
    """Write a vector to elements start, start + 1, ... of a contiguous array."""

    def build(builder: ir.IRBuilder, place: Any, value: Any) -> None:
        builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)

    return types.void(array, start, value), by_elements(build)


@intrinsic
def prefetch(typing_context, array, start):  # type: ignore[no-untyped-def]
    """Prefetch the cache line of element `start`; harmless beyond the end of the array."""
    return types.void(array, start), _prefetch_near(3)


@intrinsic
def prefetch_early(typing_context, array, start):  # type: ignore[no-untyped-def]
    """Prefetch a cache line into the second-level cache, if the first level would evict it before it is needed."""
    return types.void(array, start), _prefetch_near(2)


def _prefetch_near(locality: int) -> Generate:
    how = [ir.IntType(32)(number) for number in (0, locality, 1)]

    def build(builder: ir.IRBuilder, place: Any) -> None:
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.bitcast(place, cgutils.voidptr_t), *how])

    return by_elements(build)


@intrinsic
def fill(typing_context, vector, scalar):  # type: ignore[no-untyped-def]
    """A vector with the scalar, converted to its element type, in every lane."""
    sig = vector.instance_type(vector, scalar)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        element = context.cast(builder, args[1], sig.args[1], sig.return_type.element)
        undefined = ir.Constant(sig.return_type.llvm_type(), ir.Undefined)
        lane_0 = builder.insert_element(undefined, element, ir.IntType(32)(0))
        return shuffle(builder, (lane_0, undefined), [0] * sig.return_type.lanes)

    return sig, generate


@intrinsic
def lane_numbers(typing_context, vector):  # type: ignore[no-untyped-def]
    """The integer vector 0, 1, 2, ..."""
    kind = vector.instance_type
    return kind(vector), by_values(lambda builder, _: ir.Constant(kind.llvm_type(), list(range(kind.lanes))))


@intrinsic
def convert(typing_context, vector, value):  # type: ignore[no-untyped-def]
    """Convert lanes to another element type: integers to wider ones, floats to truncated integers, any to floats."""
    source, target = value, vector.instance_type
    if source.is_float and not target.is_float:
        name = "fptosi"
    elif source.is_float:
        name = "fptrunc" if target.element < source.element else "fpext"
    elif target.is_float:
        name = "sitofp"
    else:
        name = "sext" if source.element.signed else "zext"
    build = by_values(lambda builder, _, value: getattr(builder, name)(value, target.llvm_type()))
    return target(vector, value), build


@intrinsic
def floats_of_halves(typing_context, value):  # type: ignore[no-untyped-def]
    """The float32 values of lanes that hold float16 bits."""
    floats, halves = Vector(types.float32, value.lanes), ir.VectorType(ir.HalfType(), value.lanes)

    def build(builder: ir.IRBuilder, value: Any) -> Any:
        return builder.fpext(builder.bitcast(value, halves), floats.llvm_type())

    return floats(value), by_values(build)


@intrinsic
def as_bits(typing_context, vector, value):  # type: ignore[no-untyped-def]
    """Reinterpret the bits as another vector type of the same size."""
    kind = vector.instance_type
    return kind(vector, value), by_values(lambda builder, _, value: builder.bitcast(value, kind.llvm_type()))
