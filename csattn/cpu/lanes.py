"""Operations on the lanes of `simd` vectors: shuffles, choices, comparisons to bit masks, reductions."""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csattn.cpu.llvm import call, element_pointer, shuffle
from csattn.cpu.simd import Vector

llvmlite.binding.initialize_native_asmparser()


@intrinsic
def part(typing_context, vector, value, number):  # type: ignore[no-untyped-def]
    """Part `number` (a literal) of a vector, cut into pieces of the given type."""
    if not isinstance(number, types.IntegerLiteral):
        return None
    piece = number.literal_value
    sig = vector.instance_type(vector, value, number)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        lanes = sig.return_type.lanes
        return shuffle(builder, (args[1], args[1]), list(range(piece * lanes, (piece + 1) * lanes)))

    return sig, generate


def _compare(builder: ir.IRBuilder, vector: Vector) -> Any:
    """The comparison of such lanes."""
    if vector.is_float:
        return builder.fcmp_ordered
    return builder.icmp_signed if vector.element.signed else builder.icmp_unsigned


def _first_where(comparison: str) -> Any:
    """What generates the choice between two vectors: the lanes of the first where that is true."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.select(_compare(builder, sig.return_type)(comparison, *args), *args)

    return generate


def _suffix(vector: Vector) -> str:
    return f"v{vector.lanes}{'f' if vector.is_float else 'i'}{vector.element.bitwidth}"


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once, on every machine."""
    sig = a(a, b, c)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return call(builder, f"llvm.fma.{_suffix(sig.return_type)}", args[0].type, list(args))

    return sig, generate


@intrinsic
def smaller(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The smaller of each two lanes; b where a is NaN."""
    return a(a, b), _first_where("<")


@intrinsic
def larger(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The larger of each two lanes; b where a is NaN."""
    return a(a, b), _first_where(">")


@intrinsic
def less_or_zero(typing_context, a, b):  # type: ignore[no-untyped-def]
    """a - b in the lanes of unsigned integers where that is above 0, 0 in the others."""
    sig = a(a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return call(builder, f"llvm.usub.sat.{_suffix(sig.return_type)}", args[0].type, list(args))

    return sig, generate


@intrinsic
def where_equal(typing_context, a, b, then, otherwise):  # type: ignore[no-untyped-def]
    """`then` in the lanes where the integers a and b are equal, `otherwise` in the others."""
    sig = then(a, b, then, otherwise)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("==", args[0], args[1]), args[2], args[3])

    return sig, generate


@intrinsic
def where_less(typing_context, a, b, then, otherwise):  # type: ignore[no-untyped-def]
    """`then` in the lanes where the signed integer a is less than b, `otherwise` in the others."""
    sig = then(a, b, then, otherwise)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[2], args[3])

    return sig, generate


@intrinsic
def mask_at_least(typing_context, a, b):  # type: ignore[no-untyped-def]
    """A uint64 with bit i set where lane i of the integers a is at least that of b; up to 64 lanes."""
    sig = types.uint64(a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        bits = _compare(builder, sig.args[0])(">=", *args)
        return builder.zext(builder.bitcast(bits, ir.IntType(sig.args[0].lanes)), ir.IntType(64))

    return sig, generate


@intrinsic
def pack_lanes(typing_context, value, bits):  # type: ignore[no-untyped-def]
    """The int32 lanes whose bits are set, in their order, from lane 0 on; what is in the lanes behind them is open."""
    sig = value(value, types.uint64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        value, kind, lanes = args[0], args[0].type, sig.return_type.lanes
        bits = builder.trunc(args[1], ir.IntType(lanes))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), lanes))
        if lanes == 16 and "+avx512f" in context.codegen().magic_tuple()[2]:
            # by name: LLVM's own would write to memory, which some machines do lane by lane
            return call(builder, "llvm.x86.avx512.mask.compress.v16i32", kind, [value, value, mask])
        i32 = ir.IntType(32)
        packed = cgutils.alloca_once(builder, ir.ArrayType(i32, lanes))
        at = i32(0)
        for lane in range(lanes):
            place = builder.gep(packed, [i32(0), at])
            builder.store(builder.extract_element(value, i32(lane)), place)
            at = builder.add(at, builder.zext(builder.extract_element(mask, i32(lane)), i32))
        return builder.load(builder.bitcast(packed, kind.as_pointer()), align=4)

    return sig, generate


@intrinsic
def store_first(typing_context, array, start, value, count):  # type: ignore[no-untyped-def]
    """Write the first lanes, as many as `count` says, to elements start, start + 1, ... of a contiguous array."""
    sig = types.void(array, start, value, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind, i32 = args[2].type, ir.IntType(32)
        lanes = kind.count
        address = element_pointer(context, builder, sig, args)
        address = builder.bitcast(address, kind.as_pointer())
        index = ir.VectorType(i32, lanes)
        counts = builder.insert_element(ir.Constant(index, ir.Undefined), builder.trunc(args[3], i32), i32(0))
        counts = shuffle(builder, (counts, counts), [0] * lanes)
        mask = builder.icmp_signed("<", ir.Constant(index, list(range(lanes))), counts)
        name = f"llvm.masked.store.{_suffix(sig.args[2])}.p0"
        call(builder, name, ir.VoidType(), [args[2], address, i32(4), mask])
        return context.get_dummy_value()

    return sig, generate


@intrinsic
def sum_of_lanes(typing_context, value):  # type: ignore[no-untyped-def]
    """The sum of all lanes; of floats in the order of the lanes."""
    sig = value.element(value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        vector = sig.args[0]
        scalar = vector.llvm_type().element
        if vector.is_float:
            return call(builder, f"llvm.vector.reduce.fadd.{_suffix(vector)}", scalar, [scalar(0.0), args[0]])
        return call(builder, f"llvm.vector.reduce.add.{_suffix(vector)}", scalar, [args[0]])

    return sig, generate


@intrinsic
def largest_lane(typing_context, value):  # type: ignore[no-untyped-def]
    """The largest of the integer lanes."""
    sig = value.element(value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        vector = sig.args[0]
        kind = "smax" if vector.element.signed else "umax"
        return call(builder, f"llvm.vector.reduce.{kind}.{_suffix(vector)}", vector.llvm_type().element, [args[0]])

    return sig, generate


@intrinsic
def smallest_lane(typing_context, value):  # type: ignore[no-untyped-def]
    """The smallest of the signed integer lanes."""
    sig = value.element(value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        vector = sig.args[0]
        return call(builder, f"llvm.vector.reduce.smin.{_suffix(vector)}", vector.llvm_type().element, [args[0]])

    return sig, generate


@intrinsic
def largest_of_eights(typing_context, a, b, c, d):  # type: ignore[no-untyped-def]
    """Of every eight neighbouring lanes the largest, of a's first; each has 32."""
    sig = Vector(a.element, a.lanes // 2)(a, b, c, d)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        compare, largest = _compare(builder, sig.args[0]), []
        for value in args:
            for step in (1, 2, 4):
                turned = shuffle(builder, [value, value], [lane ^ step for lane in range(sig.args[0].lanes)])
                value = builder.select(compare(">", value, turned), value, turned)
            largest.append(value)
        firsts = list(range(0, 2 * sig.args[0].lanes, 8))
        halves = [shuffle(builder, largest[i : i + 2], firsts) for i in (0, 2)]
        return shuffle(builder, halves, list(range(2 * len(firsts))))

    return sig, generate


@intrinsic
def trailing_zeros(typing_context, bits):  # type: ignore[no-untyped-def]
    """The number of the lowest set bit of a uint64; there must be one."""
    sig = types.uint64(types.uint64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return sig, generate


@intrinsic
def population(typing_context, bits):  # type: ignore[no-untyped-def]
    """How many bits of a uint64 are set, as int64."""
    sig = types.int64(types.uint64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return sig, generate


@intrinsic
def lane_0(typing_context, value):  # type: ignore[no-untyped-def]
    """The first lane."""
    sig = value.element(value)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.IntType(32)(0))

    return sig, generate
