"""Operations on the lanes of `simd` vectors: shuffles, selects, comparisons to bit masks, reductions."""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csattn.cpu.llvm import Generate, by_elements, by_values, call, element_pointer, shuffle
from csattn.cpu.simd import LANES, Vector

llvmlite.binding.initialize_native_asmparser()


@intrinsic
def part(typing_context, vector, value, number):  # type: ignore[no-untyped-def]
    """Part `number` (a literal) of a vector that is cut into pieces of the given type."""
    if not isinstance(number, types.IntegerLiteral):
        return None
    sig, lanes = vector.instance_type(vector, value, number), vector.instance_type.lanes
    order = list(range(number.literal_value * lanes, (number.literal_value + 1) * lanes))
    return sig, by_values(lambda builder, _, value, number: shuffle(builder, (value, value), order))


@intrinsic
def with_part(typing_context, value, part, first):  # type: ignore[no-untyped-def]
    """The vector with its lanes from `first` on replaced by those of another, which is no longer."""
    sig = value(value, part, types.intp)

    def build(builder: ir.IRBuilder, value: Any, part: Any, first: Any) -> Any:
        if part.type.count == value.type.count:
            return part
        memory = cgutils.alloca_once(builder, value.type)
        builder.store(value, memory)
        place = builder.gep(builder.bitcast(memory, value.type.element.as_pointer()), [first])
        builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=1)
        return builder.load(memory)

    return sig, by_values(build)


def _compare(builder: ir.IRBuilder, vector: Vector) -> Any:
    """The builder's comparison for lanes of this type."""
    if vector.is_float:
        return builder.fcmp_ordered
    return builder.icmp_signed if vector.element.signed else builder.icmp_unsigned


def _first_where(comparison: str, vector: Vector) -> Generate:
    """A select between two vectors: lanes of the first where the comparison holds, else of the second."""
    return by_values(lambda builder, a, b: builder.select(_compare(builder, vector)(comparison, a, b), a, b))


def _suffix(vector: Vector) -> str:
    return f"v{vector.lanes}{'f' if vector.is_float else 'i'}{vector.element.bitwidth}"


def _call(name: str, vector: Vector) -> Generate:
    """A call of LLVM's intrinsic of that name, from vectors to one of the same type."""
    return by_values(lambda builder, *args: call(builder, f"llvm.{name}.{_suffix(vector)}", args[0].type, args))


def _reduce(name: str, vector: Vector, *begin: float) -> Generate:
    """A call of LLVM's intrinsic of that name that reduces all lanes to a scalar."""
    scalar = vector.llvm_type().element

    def build(builder: ir.IRBuilder, value: Any) -> Any:
        args = [*map(scalar, begin), value]
        return call(builder, f"llvm.vector.reduce.{name}.{_suffix(vector)}", scalar, args)

    return by_values(build)


def _where(comparison: str) -> Generate:
    """A select by a comparison of signed integers."""

    def build(builder: ir.IRBuilder, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        return builder.select(builder.icmp_signed(comparison, a, b), then, otherwise)

    return by_values(build)


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once, on every machine."""
    return a(a, b, c), _call("fma", a)


@intrinsic
def smaller(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The lanewise minimum; b where either is NaN."""
    return a(a, b), _first_where("<", a)


@intrinsic
def larger(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The lanewise maximum; b where either is NaN."""
    return a(a, b), _first_where(">", a)


@intrinsic
def less_or_zero(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The saturating difference a - b of unsigned integers: 0 in lanes where b is larger."""
    return a(a, b), _call("usub.sat", a)


@intrinsic
def where_equal(typing_context, a, b, then, otherwise):  # type: ignore[no-untyped-def]
    """`then` in the lanes where the integers a and b are equal, `otherwise` in the others."""
    return then(a, b, then, otherwise), _where("==")


@intrinsic
def where_less(typing_context, a, b, then, otherwise):  # type: ignore[no-untyped-def]
    """`then` in the lanes where the signed integer a is less than b, `otherwise` in the others."""
    return then(a, b, then, otherwise), _where("<")


@intrinsic
def mask_at_least(typing_context, a, b):  # type: ignore[no-untyped-def]
    """A uint64 with bit i set where lane i of a is at least that of b, and neither is NaN; up to 64 lanes."""
    lanes = ir.IntType(a.lanes)

    def build(builder: ir.IRBuilder, x: Any, y: Any) -> Any:
        return builder.zext(builder.bitcast(_compare(builder, a)(">=", x, y), lanes), ir.IntType(64))

    return types.uint64(a, b), by_values(build)


@intrinsic
def pack_lanes(typing_context, value, bits):  # type: ignore[no-untyped-def]
    """Compress: move the int32 lanes whose bits are set to the first lanes, in order. The other lanes are undefined."""
    sig = value(value, types.uint64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        value, kind, lanes = args[0], args[0].type, sig.return_type.lanes
        bits = builder.trunc(args[1], ir.IntType(lanes))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), lanes))
        if lanes == 16 and "+avx512f" in context.codegen().magic_tuple()[2]:
            # this intrinsic, because LLVM's generic one writes to memory, which some machines do lane by lane
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
def add_expanded(typing_context, sums, array, start, bits):  # type: ignore[no-untyped-def]
    """Expand and add: lanes of sums with a set bit get the elements start, start + 1, ... of a float32 array added.

    May read 16 elements, as many as there are lanes, however few bits are set.
    """
    sig = sums(sums, array, types.intp, types.uint64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        sums, bits, features = args[0], builder.trunc(args[3], ir.IntType(LANES)), context.codegen().magic_tuple()[2]
        place = element_pointer(context, builder, sig, args, 1)
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        how = expand_by_mask if "+avx512f" in features else expand_by_table if "+avx2" in features else expand_singly
        return builder.select(mask, builder.fadd(sums, how(builder, place, bits, mask, sums.type)), sums)

    return sig, generate


def expand_by_mask(builder: ir.IRBuilder, place: Any, _: Any, mask: Any, kind: ir.VectorType) -> Any:
    value = builder.load(builder.bitcast(place, kind.as_pointer()), align=4)
    return call(builder, "llvm.x86.avx512.mask.expand.v16f32", kind, [value, ir.Constant(kind, None), mask])


def expand_by_table(builder: ir.IRBuilder, place: Any, bits: Any, mask: Any, kind: ir.VectorType) -> Any:
    """Expand half by half: a table has, for each byte of bits, the element that each of eight lanes takes."""
    i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    table, halves = _places_of_bytes(builder.module), []
    half, places = ir.VectorType(kind.element, 8), ir.VectorType(i32, 8)
    for shift in (0, 8):
        byte = builder.trunc(builder.lshr(bits, bits.type(shift)), i8)
        own = builder.load(builder.gep(table, [i64(0), builder.zext(byte, i64)]))
        value = builder.load(builder.bitcast(place, half.as_pointer()), align=4)
        halves.append(call(builder, "llvm.x86.avx2.permps", half, [value, builder.bitcast(own, places)]))
        place = builder.gep(place, [builder.zext(builder.ctpop(byte), i64)])
    return shuffle(builder, halves, list(range(LANES)))


def _places_of_bytes(module: ir.Module) -> ir.GlobalVariable:
    """A table of 256 bytes' prefix sums of bits: for each bit of a byte, how many lower bits are set."""
    name, row = "csattn_places_of_bytes", ir.VectorType(ir.IntType(32), 8)
    if name not in module.globals:
        kind = ir.ArrayType(row, 256)
        table = ir.GlobalVariable(module, kind, name)
        places = [[(byte & ((1 << lane) - 1)).bit_count() for lane in range(8)] for byte in range(256)]
        table.initializer, table.global_constant = ir.Constant(kind, [ir.Constant(row, own) for own in places]), True
        table.linkage = "internal"
    return module.globals[name]


def expand_singly(builder: ir.IRBuilder, place: Any, _: Any, mask: Any, kind: ir.VectorType) -> Any:
    value, i32 = ir.Constant(kind, ir.Undefined), ir.IntType(32)
    for lane in range(LANES):
        value = builder.insert_element(value, builder.load(place), i32(lane))
        place = builder.gep(place, [builder.zext(builder.extract_element(mask, i32(lane)), i32)])
    return value


@intrinsic
def store_first(typing_context, array, start, value, count):  # type: ignore[no-untyped-def]
    """Write the first `count` lanes to elements start, start + 1, ... of a contiguous array."""
    name, lanes, i32 = f"llvm.masked.store.{_suffix(value)}.p0", value.lanes, ir.IntType(32)

    def build(builder: ir.IRBuilder, place: Any, value: Any, count: Any) -> None:
        address = builder.bitcast(place, value.type.as_pointer())
        index = ir.VectorType(i32, lanes)
        counts = builder.insert_element(ir.Constant(index, ir.Undefined), builder.trunc(count, i32), i32(0))
        counts = shuffle(builder, (counts, counts), [0] * lanes)
        mask = builder.icmp_signed("<", ir.Constant(index, list(range(lanes))), counts)
        call(builder, name, ir.VoidType(), [value, address, i32(4), mask])

    return types.void(array, start, value, types.int64), by_elements(build)


@intrinsic
def sum_of_lanes(typing_context, value):  # type: ignore[no-untyped-def]
    """The sum of all lanes; floats are added in lane order."""
    return value.element(value), _reduce("fadd", value, 0.0) if value.is_float else _reduce("add", value)


@intrinsic
def largest_lane(typing_context, value):  # type: ignore[no-untyped-def]
    """The maximum over the lanes, none of which is NaN."""
    name = "fmax" if value.is_float else "smax" if value.element.signed else "umax"
    return value.element(value), _reduce(name, value)


@intrinsic
def largest_of_eights(typing_context, a, b, c, d):  # type: ignore[no-untyped-def]
    """The maximum of every eight neighbouring lanes, first a's, then b's, c's and d's; each vector has 32 lanes."""
    vector: Vector = a

    def build(builder: ir.IRBuilder, *values: Any) -> Any:
        compare, largest = _compare(builder, vector), []
        for value in values:
            for step in (1, 2, 4):
                shuffled = shuffle(builder, [value, value], [lane ^ step for lane in range(vector.lanes)])
                value = builder.select(compare(">", value, shuffled), value, shuffled)
            largest.append(value)
        firsts = list(range(0, 2 * vector.lanes, 8))
        halves = [shuffle(builder, largest[i : i + 2], firsts) for i in (0, 2)]
        return shuffle(builder, halves, list(range(2 * len(firsts))))

    return Vector(vector.element, vector.lanes // 2)(a, b, c, d), by_values(build)


@intrinsic
def trailing_zeros(typing_context, bits):  # type: ignore[no-untyped-def]
    """The index of the lowest set bit of a uint64, which must have one."""
    return types.uint64(types.uint64), by_values(lambda builder, bits: builder.cttz(bits, ir.IntType(1)(1)))


@intrinsic
def population(typing_context, bits):  # type: ignore[no-untyped-def]
    """How many bits of a uint64 are set, as int64."""
    return types.int64(types.uint64), by_values(lambda builder, bits: builder.ctpop(bits))


@intrinsic
def lane_0(typing_context, value):  # type: ignore[no-untyped-def]
    """The first lane."""
    return value.element(value), by_values(lambda builder, value: builder.extract_element(value, ir.IntType(32)(0)))
