"""Operations on 32-bit lanes of four bytes: shuffles, and dot products of bytes."""

from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu.llvm import Generate, by_values, call, shuffle
from csattn.cpu.simd import Vector


@intrinsic
def transpose_bytes(typing_context, value):  # type: ignore[no-untyped-def]
    """Transpose the bytes of every four lanes: byte i of lane j becomes byte j of lane i."""
    return value(value), _shuffle_bytes([4 * byte + lane for lane in range(4) for byte in range(4)])


@intrinsic
def gather_byte(typing_context, value, number):  # type: ignore[no-untyped-def]
    """In each group of four lanes, every lane gets byte `number` (a literal) of each of the four."""
    if not isinstance(number, types.IntegerLiteral):
        return None
    return value(value, number), _shuffle_bytes(
        [4 * byte + number.literal_value for _ in range(4) for byte in range(4)]
    )


def _shuffle_bytes(order: list[int]) -> Generate:
    """Shuffle every 16 bytes in this order."""

    def build(builder: ir.IRBuilder, value: Any, *_: Any) -> Any:
        num_bytes = 4 * value.type.count
        as_bytes = builder.bitcast(value, ir.VectorType(ir.IntType(8), num_bytes))
        places = [first + place for first in range(0, num_bytes, 16) for place in order]
        return builder.bitcast(shuffle(builder, (as_bytes, as_bytes), places), value.type)

    return by_values(build)


@intrinsic
def bits_of_bytes(typing_context, value, first, count):  # type: ignore[no-untyped-def]
    """From each byte of 32-bit lanes, extract `count` bits from bit `first` on (both literals), as a number."""
    if not (isinstance(first, types.IntegerLiteral) and isinstance(count, types.IntegerLiteral)):
        return None
    sig = value(value, first, count)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        shift, number, kind = sig.args[1].literal_value, sig.args[2].literal_value, args[0].type
        masks = ir.Constant(kind, [((1 << number) - 1) * 0x01010101] * kind.count)
        if shift == 0:
            return builder.and_(args[0], masks)
        if kind.count == 16 and "+gfni" in context.codegen().magic_tuple()[2]:
            # a product with a bit matrix: its byte 7 - i selects the bits that make up bit i
            matrix = sum(1 << (8 * (7 - i) + shift + i) for i in range(number))
            as_bytes = ir.VectorType(ir.IntType(8), 4 * kind.count)
            matrices = ir.Constant(ir.VectorType(ir.IntType(64), kind.count // 2), [matrix] * (kind.count // 2))
            operands = [builder.bitcast(x, as_bytes) for x in (args[0], matrices)]
            name = "llvm.x86.vgf2p8affineqb.512"
            return builder.bitcast(call(builder, name, as_bytes, [*operands, ir.IntType(8)(0)]), kind)
        return builder.and_(builder.lshr(args[0], ir.Constant(kind, [shift] * kind.count)), masks)

    return sig, generate


@intrinsic
def add_byte_dots(typing_context, sums, a, b):  # type: ignore[no-untyped-def]
    """sums[i] + the dot product of lane i's four bytes of a (unsigned) and of b (0 to 15), in 32-bit lanes."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return add_dots(builder, context.codegen().magic_tuple(), "u", *args)

    return sums(sums, a, b), generate


@intrinsic
def add_half_dots(typing_context, sums, a, b):  # type: ignore[no-untyped-def]
    """Like `add_byte_dots` for bytes of a from 0 to 15 and signed bytes of b, modulo 2**16.

    Lanes may hold two partial sums of 16 bits each, which `join_halves` adds.
    """
    sig = sums(sums, a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        target = context.codegen().magic_tuple()
        if not _sums_in_halves(sig.return_type, target[2]):
            return add_dots(builder, target, "s", *args)
        halves = ir.VectorType(ir.IntType(16), 2 * sig.return_type.lanes)
        pairs = _pairs(builder, "+avx512bw" in target[2], args[1], args[2])
        return builder.bitcast(builder.add(builder.bitcast(args[0], halves), pairs), args[0].type)

    return sig, generate


@intrinsic
def join_halves(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The 16-bit sums of `add_half_dots` in a's lanes, then in b's.

    Their initial values must be from 0 to 2**16 - 1.
    """
    sig = Vector(types.Integer.from_bitwidth(a.element.bitwidth // 2, False), 2 * a.lanes)(a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        halves = [builder.bitcast(value, sig.return_type.llvm_type()) for value in args]
        sums = shuffle(builder, halves, list(range(0, 2 * sig.return_type.lanes, 2)))
        if _sums_in_halves(sig.args[0], context.codegen().magic_tuple()[2]):
            sums = builder.add(sums, shuffle(builder, halves, list(range(1, 2 * sig.return_type.lanes, 2))))
        return sums

    return sig, generate


def add_dots(builder: ir.IRBuilder, target: tuple[str, str, str], sign: str, sums: Any, a: Any, b: Any) -> Any:
    """Emit dot products of bytes for a target machine: LLVM's triple, the CPU's name, its features.

    sign: whether all bytes may be treated as signed (s) or as unsigned (u).
    """
    triple, cpu, features = target
    if sums.type.count == 16 and "+avx512vnni" in features:
        return _fused_dots(builder, sums, a, b)
    if sums.type.count == 16 and "+avx2" in features:
        return builder.add(sums, pairs_of_pairs(builder, "+avx512bw" in features, a, b))
    if triple.startswith(("aarch64", "arm64")):
        return _arm_dots(builder, sign, has_arm_dots(triple, cpu, features), sums, a, b)
    return plain_byte_dots(builder, sums, a, b)


def _sums_in_halves(vector: Vector, features: str) -> bool:
    """Whether lanes hold two 16-bit sums each: if the machine sums pairs of products, they are joined only once."""
    return vector.lanes == 16 and "+avx2" in features and "+avx512vnni" not in features


def _fused_dots(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    # LLVM knows the instruction, but splits it in chains of sums, for less latency: that is slower
    dot = ir.FunctionType(sums.type, [sums.type] * 3)
    return builder.asm(dot, "vpdpbusd $3, $2, $0", "=v,0,v,v", [sums, a, b], side_effect=False)


def _pairs(builder: ir.IRBuilder, whole: bool, a: Any, b: Any) -> Any:
    """Sums of two products of bytes in 16 bits. AVX2 (not `whole`) computes half a vector at a time."""
    i8, i16 = ir.IntType(8), ir.IntType(16)
    a, b = (builder.bitcast(x, ir.VectorType(i8, 64)) for x in (a, b))
    if whole:
        return call(builder, "llvm.x86.avx512.pmaddubs.w.512", ir.VectorType(i16, 32), [a, b])
    halves = []
    for first in (0, 32):
        parts = [shuffle(builder, [x] * 2, list(range(first, first + 32))) for x in (a, b)]
        halves.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(i16, 16), parts))
    return shuffle(builder, halves, list(range(32)))


def pairs_of_pairs(builder: ir.IRBuilder, whole: bool, a: Any, b: Any) -> Any:
    """Dot products of four bytes in AVX2, or in AVX-512 (`whole`): sums of two in 16 bits, then of two of those."""
    i16, i32 = ir.IntType(16), ir.IntType(32)
    pairs = _pairs(builder, whole, a, b)
    if whole:
        ones = ir.Constant(ir.VectorType(i16, 32), [1] * 32)
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", ir.VectorType(i32, 16), [pairs, ones])
    ones, halves = ir.Constant(ir.VectorType(i16, 16), [1] * 16), []
    for first in (0, 16):
        part = shuffle(builder, [pairs] * 2, list(range(first, first + 16)))
        halves.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(i32, 8), [part, ones]))
    return shuffle(builder, halves, list(range(16)))


@cache
def has_arm_dots(triple: str, cpu: str, features: str) -> bool:
    """Whether LLVM may emit sdot and udot for an ARM machine.

    `features` does not say: LLVM's list for the running machine lacks them, and LLVM infers them from the CPU's name.
    """
    machine = llvmlite.binding.Target.from_triple(triple).create_target_machine(cpu, features)
    module = llvmlite.binding.parse_assembly(_SUM_OF_PRODUCTS)
    module.triple = triple
    return "udot" in machine.emit_assembly(module)


_SUM_OF_PRODUCTS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @sum_of_products(<16 x i8> %a, <16 x i8> %b) {
    %wide_a = zext <16 x i8> %a to <16 x i32>
    %wide_b = zext <16 x i8> %b to <16 x i32>
    %products = mul <16 x i32> %wide_a, %wide_b
    %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
    ret i32 %sum
}
"""


def _arm_dots(builder: ir.IRBuilder, sign: str, in_one: bool, *operands: Any) -> Any:
    """Dot products on ARM, four lanes at a time: in one instruction, or by products and sums of pairs in 16 bits.

    16 bits are wide enough.
    """
    i8, i16, i32, parts = ir.IntType(8), ir.IntType(16), ir.IntType(32), []
    for first in range(0, operands[0].type.count, 4):
        sums, *factors = (shuffle(builder, [x, x], list(range(first, first + 4))) for x in operands)
        factors = [builder.bitcast(x, ir.VectorType(i8, 16)) for x in factors]
        if in_one:
            parts.append(call(builder, f"llvm.aarch64.neon.{sign}dot.v4i32.v16i8", sums.type, [sums, *factors]))
            continue
        products = []
        for half in (list(range(8)), list(range(8, 16))):
            halves = [shuffle(builder, [x, x], half) for x in factors]
            products.append(call(builder, f"llvm.aarch64.neon.{sign}mull.v8i16", ir.VectorType(i16, 8), halves))
        pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", ir.VectorType(i16, 8), products)
        fours = call(builder, f"llvm.aarch64.neon.{sign}addlp.v4i32.v8i16", ir.VectorType(i32, 4), [pairs])
        parts.append(builder.add(sums, fours))
    while len(parts) > 1:
        order = list(range(2 * parts[0].type.count))
        parts = [shuffle(builder, parts[i : i + 2], order) for i in range(0, len(parts), 2)]
    return parts[0]


def plain_byte_dots(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """`add_byte_dots` on any machine."""

    def lanes(value: int) -> Any:
        return ir.Constant(a.type, [value] * a.type.count)

    for byte in range(4):
        of_a = builder.and_(builder.lshr(a, lanes(8 * byte)), lanes(0xFF))
        of_b = builder.ashr(builder.shl(b, lanes(24 - 8 * byte)), lanes(24))
        sums = builder.add(sums, builder.mul(of_a, of_b))
    return sums
