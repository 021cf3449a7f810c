"""Operations on lanes of four bytes: shuffles, and sums of products of bytes."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.search.lanes import call, shuffle
from csattn.search.simd import Vector


@intrinsic
def narrow(typing_context, a, b):  # type: ignore[no-untyped-def]
    """The lower halves of a's lanes, then of b's."""
    sig = Vector(types.Integer.from_bitwidth(a.element.bitwidth // 2, True), 2 * a.lanes)(a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        halves = [builder.bitcast(value, sig.return_type.llvm_type()) for value in args]
        return shuffle(builder, halves, list(range(0, 2 * sig.return_type.lanes, 2)))

    return sig, generate


@intrinsic
def turn_fours(typing_context, value):  # type: ignore[no-untyped-def]
    """Of every four lanes of four bytes, byte i of lane j becomes byte j of lane i."""
    return value(value), _shuffle_bytes([4 * byte + lane for lane in range(4) for byte in range(4)])


@intrinsic
def spread_byte(typing_context, value, number):  # type: ignore[no-untyped-def]
    """Every lane gets, of the four lanes it belongs to, byte `number` (a literal) of each."""
    if not isinstance(number, types.IntegerLiteral):
        return None
    return value(value, number), _shuffle_bytes(
        [4 * byte + number.literal_value for _ in range(4) for byte in range(4)]
    )


def _shuffle_bytes(order: list[int]) -> Any:
    """In every 16 bytes alike."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        num_bytes = 4 * sig.return_type.lanes
        value = builder.bitcast(args[0], ir.VectorType(ir.IntType(8), num_bytes))
        places = [first + place for first in range(0, num_bytes, 16) for place in order]
        return builder.bitcast(shuffle(builder, (value, value), places), args[0].type)

    return generate


@intrinsic
def add_byte_dots(typing_context, sums, a, b):  # type: ignore[no-untyped-def]
    """sums[i] + the sum over lane i's four bytes of a, unsigned, times those of b, signed, as 32-bit lanes.

    Of each two factors one must be below 16.
    """
    sig = sums(sums, a, b)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind, features = args[0].type, context.codegen().magic_tuple()[2]
        if sig.return_type.lanes == 16 and "+avx512vnni" in features:
            # LLVM knows the instruction, but takes it apart in chains of sums: shorter to wait for, and slower
            dot = ir.FunctionType(kind, [kind, kind, kind])
            return builder.asm(dot, "vpdpbusd $3, $2, $0", "=v,0,v,v", args, side_effect=False)
        if sig.return_type.lanes == 16 and "+avx2" in features:
            return builder.add(args[0], pairs_of_pairs(builder, args[1], args[2]))
        return plain_byte_dots(builder, *args)

    return sig, generate


def pairs_of_pairs(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The products' sums in AVX2, half a vector at a time: of two bytes in 16 bits, then of two of those in 32."""
    i8, i16, i32 = (ir.IntType(bits) for bits in (8, 16, 32))
    ones, halves = ir.Constant(ir.VectorType(i16, 16), [1] * 16), []
    for first in (0, 32):
        bytes_a, bytes_b = (
            shuffle(builder, [builder.bitcast(x, ir.VectorType(i8, 64))] * 2, list(range(first, first + 32)))
            for x in (a, b)
        )
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ones.type, [bytes_a, bytes_b])
        halves.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(i32, 8), [pairs, ones]))
    return shuffle(builder, halves, list(range(16)))


def plain_byte_dots(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """`add_byte_dots` on any machine."""

    def lanes(value: int) -> Any:
        return ir.Constant(a.type, [value] * a.type.count)

    for byte in range(4):
        of_a = builder.and_(builder.lshr(a, lanes(8 * byte)), lanes(0xFF))
        of_b = builder.ashr(builder.shl(b, lanes(24 - 8 * byte)), lanes(24))
        sums = builder.add(sums, builder.mul(of_a, of_b))
    return sums
