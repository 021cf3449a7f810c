"""Vectors as values inside kernels: `a = load(I32x16, x, i)`, `a * b + c`, `store(x, i, a)`; see also `lanes.py`.

LLVM's own vector types carry the code to any machine: what is wider than the machine's registers is split, and but for
`byte_lanes.add_byte_dots` no instruction is named. Loads and stores need no alignment and check no bounds. Integers
wrap around; floats round at each operation.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model, typeof_impl

from csattn.cpu.llvm import call, element_pointer, shuffle


class Vector(types.Type):  # type: ignore[misc]
    """A fixed number of equal scalars."""

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


U16x16 = Vector(types.uint16, 16)
U16x32 = Vector(types.uint16, 32)
I32x16 = Vector(types.int32, 16)
F32x16 = Vector(types.float32, 16)
F64x16 = Vector(types.float64, 16)


def _define_arithmetic(op: Callable[[Any, Any], Any], build: Callable[[ir.IRBuilder, Vector, Any, Any], Any]) -> None:
    """Give vectors of one type the operator `op`."""

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
    """The vector of elements start, start + 1, ... of a contiguous array, whose bytes are taken as they are."""
    sig = vector.instance_type(vector, array, start)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = element_pointer(context, builder, sig, args, 1)
        address = builder.bitcast(address, sig.return_type.llvm_type().as_pointer())
        return builder.load(address, align=1)

    return sig, generate


@intrinsic
def store(typing_context, array, start, value):  # type: ignore[no-untyped-def]
    """Write a vector to elements start, start + 1, ... of a contiguous array."""
    sig = types.void(array, start, value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = element_pointer(context, builder, sig, args)
        builder.store(args[2], builder.bitcast(address, args[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def prefetch(typing_context, array, start):  # type: ignore[no-untyped-def]
    """Ask for the cache line of element `start`; harmless beyond the end of the array."""
    return types.void(array, start), _prefetch_near(3)


@intrinsic
def prefetch_early(typing_context, array, start):  # type: ignore[no-untyped-def]
    """Ask for a cache line that is needed later than the first-level cache would keep it."""
    return types.void(array, start), _prefetch_near(2)


def _prefetch_near(locality: int) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = element_pointer(context, builder, sig, args)
        address = builder.bitcast(address, cgutils.voidptr_t)
        i32 = ir.IntType(32)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, i32(0), i32(locality), i32(1)])
        return context.get_dummy_value()

    return generate


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
    sig = vector.instance_type(vector)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return ir.Constant(sig.return_type.llvm_type(), list(range(sig.return_type.lanes)))

    return sig, generate


@intrinsic
def convert(typing_context, vector, value):  # type: ignore[no-untyped-def]
    """Each lane's value in another element type: integers to wider ones, floats to integers, cut off, any to floats."""
    sig = vector.instance_type(vector, value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        source, target = sig.args[1], sig.return_type
        if source.is_float and not target.is_float:
            return builder.fptosi(args[1], target.llvm_type())
        if source.is_float:
            to_float = builder.fptrunc if target.element < source.element else builder.fpext
            return to_float(args[1], target.llvm_type())
        if target.is_float:
            return builder.sitofp(args[1], target.llvm_type())
        extend = builder.sext if source.element.signed else builder.zext
        return extend(args[1], target.llvm_type())

    return sig, generate


@intrinsic
def floats_of_halves(typing_context, value):  # type: ignore[no-untyped-def]
    """The float32 values of lanes that hold float16 bits."""
    sig = Vector(types.float32, value.lanes)(value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        halves = builder.bitcast(args[0], ir.VectorType(ir.HalfType(), sig.return_type.lanes))
        return builder.fpext(halves, sig.return_type.llvm_type())

    return sig, generate


@intrinsic
def as_bits(typing_context, vector, value):  # type: ignore[no-untyped-def]
    """The same bits as another vector type of the same size."""
    sig = vector.instance_type(vector, value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[1], sig.return_type.llvm_type())

    return sig, generate
