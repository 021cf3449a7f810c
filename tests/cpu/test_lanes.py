"""Each operation on vector lanes agrees with its definition in a line or two of numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csattn.cpu import byte_lanes, lanes
from csattn.cpu.jit import exact_kernel
from csattn.cpu.llvm import element_pointer
from csattn.cpu.simd import F32x16, I32x16, Vector, fill, load, store

I32x4, I32x8 = Vector(types.int32, 4), Vector(types.int32, 8)


@exact_kernel
def _shuffles(a, transposed, gathered, fine, coarse):  # type: ignore[no-untyped-def]
    value = load(I32x16, a, 0)
    store(transposed, 0, byte_lanes.transpose_bytes(value))
    store(gathered, 0, byte_lanes.gather_byte(value, 1))
    store(fine, 0, byte_lanes.bits_of_bytes(value, 0, 4))
    store(fine, 16, byte_lanes.bits_of_bytes(value, 4, 4))
    store(coarse, 0, byte_lanes.bits_of_bytes(value, 4, 2))
    store(coarse, 16, byte_lanes.bits_of_bytes(value, 6, 2))


def test_shuffles_of_bytes_and_bits_equal_numpys(rng: np.random.Generator) -> None:
    a = rng.integers(-(2**31), 2**31, 16).astype(np.int32)
    transposed, gathered, fine, coarse = (np.zeros(size, np.int32) for size in (16, 16, 32, 32))
    _shuffles(a, transposed, gathered, fine, coarse)
    fours = a.view(np.uint8).reshape(4, 4, 4)
    np.testing.assert_array_equal(transposed.view(np.uint8).reshape(4, 4, 4), fours.swapaxes(1, 2))
    np.testing.assert_array_equal(gathered.view(np.uint8).reshape(4, 4, 4), fours[:, None, :, 1].repeat(4, axis=1))
    as_bytes = a.view(np.uint8)
    np.testing.assert_array_equal(fine.view(np.uint8), np.concatenate([as_bytes & 15, as_bytes >> 4]))
    np.testing.assert_array_equal(coarse.view(np.uint8), np.concatenate([as_bytes >> 4 & 3, as_bytes >> 6]))


@intrinsic
def _plain_dots(typing_context, sums, a, b):  # type: ignore[no-untyped-def]
    return sums(sums, a, b), lambda context, builder, sig, args: byte_lanes.plain_byte_dots(builder, *args)


def _dots_in_pairs(whole: bool, feature: str) -> Any:
    @intrinsic
    def dots(typing_context, sums, a, b):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if feature not in context.codegen().magic_tuple()[2]:
                return byte_lanes.plain_byte_dots(builder, *args)
            return builder.add(args[0], byte_lanes.pairs_of_pairs(builder, whole, args[1], args[2]))

        return sums(sums, a, b), generate

    return dots


_dots_of_halves, _dots_of_whole = _dots_in_pairs(False, "+avx2"), _dots_in_pairs(True, "+avx512bw")


@exact_kernel
def _dots(sums, a, b):  # type: ignore[no-untyped-def]
    of_a, of_b = load(I32x16, a, 0), load(I32x16, b, 0)
    store(sums, 0, _plain_dots(load(I32x16, sums, 0), of_a, of_b))
    store(sums, 16, _dots_of_halves(load(I32x16, sums, 16), of_a, of_b))
    store(sums, 32, _dots_of_whole(load(I32x16, sums, 32), of_a, of_b))


@exact_kernel
def _byte_dots(vector, lanes, sums, a, b):  # type: ignore[no-untyped-def]
    for i in range(0, 16, lanes):
        dots = byte_lanes.add_byte_dots(load(vector, sums, i), load(vector, a, 4 * i), load(vector, b, 4 * i))
        store(sums, i, dots)


@exact_kernel
def _half_dots(vector, lanes, sums, a, b, joined):  # type: ignore[no-untyped-def]
    for i in range(0, 16, lanes):
        begin = load(vector, sums, i) & fill(vector, 0xFFFF)
        dots = byte_lanes.add_half_dots(begin, load(vector, a, 4 * i), load(vector, b, 4 * i))
        store(joined, 2 * i, byte_lanes.join_halves(begin, dots))


def _bytes_and_dots(rng: np.random.Generator, largest: int, least_b: int, largest_b: int) -> Any:
    """Return bytes a and b, initial sums, and the sums after the dot products of a and b are added."""
    a = rng.integers(0, largest + 1, 64).astype(np.uint8)
    b = rng.integers(least_b, largest_b + 1, 64).astype(np.int8)
    a[:8], b[:4], b[4:8] = largest, largest_b, least_b
    begin = rng.integers(-(2**31), 2**31, 16).astype(np.int32)
    return a, b, begin, (begin + (a.astype(np.int64) * b).reshape(16, 4).sum(axis=1)).astype(np.int32)


@pytest.mark.parametrize("ranges", [(15, -127, 127), (255, 0, 15)])
def test_every_implementation_of_byte_dot_products_gives_the_same_sums(
    ranges: tuple[int, int, int], rng: np.random.Generator
) -> None:
    a, b, begin, want = _bytes_and_dots(rng, *ranges)
    sums = np.tile(begin, 3)
    _dots(sums, a, b)
    np.testing.assert_array_equal(sums.reshape(3, 16), np.stack([want] * 3))


@pytest.mark.parametrize("vector", [I32x4, I32x16])
def test_this_machines_byte_dot_products_equal_numpys(vector: Vector, rng: np.random.Generator) -> None:
    a, b, begin, want = _bytes_and_dots(rng, 255, 0, 15)
    _byte_dots(vector, vector.lanes, begin, a, b)
    np.testing.assert_array_equal(begin, want)
    a, b, begin, want = _bytes_and_dots(rng, 15, -127, 127)
    joined = np.zeros(32, np.uint16)
    _half_dots(vector, vector.lanes, begin, a, b, joined)
    both = np.stack([begin.reshape(-1, vector.lanes), want.reshape(-1, vector.lanes)], axis=1)
    np.testing.assert_array_equal(joined, both.reshape(-1).astype(np.uint16))


def _spreading(how: Callable[..., Any], feature: str) -> Any:
    @intrinsic
    def expanded(typing_context, array, start, bits):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            usable = feature in context.codegen().magic_tuple()[2]
            place, few = element_pointer(context, builder, sig, args), builder.trunc(args[2], ir.IntType(16))
            mask = builder.bitcast(few, ir.VectorType(ir.IntType(1), 16))
            return (how if usable else lanes.expand_singly)(builder, place, few, mask, F32x16.llvm_type())

        return F32x16(array, types.intp, types.uint64), generate

    return expanded


_by_mask, _by_table = _spreading(lanes.expand_by_mask, "+avx512f"), _spreading(lanes.expand_by_table, "+avx2")
_singly = _spreading(lanes.expand_singly, "")


@exact_kernel
def _expand(values, bits, expanded, sums):  # type: ignore[no-untyped-def]
    store(expanded, 0, _by_mask(values, 3, bits))
    store(expanded, 16, _by_table(values, 3, bits))
    store(expanded, 32, _singly(values, 3, bits))
    store(sums, 0, lanes.add_expanded(load(F32x16, sums, 0), values, 3, bits))


@pytest.mark.parametrize("bits", [0, 1, 0b1010_0110, 0b1000_0000, 0xFF, 0xFFFF, 0x8001, 0xFF00, 0x1FFFF])
def test_every_implementation_of_lane_expansion_gives_the_same_lanes(bits: int, rng: np.random.Generator) -> None:
    values, sums = rng.standard_normal((2, 19)).astype(np.float32)
    lanes_set = np.array([bits >> lane & 1 for lane in range(16)], np.bool_)
    want = sums[:16].copy()
    want[lanes_set] += values[3 : 3 + lanes_set.sum()]
    expanded = np.zeros((3, 16), np.float32)
    _expand(values, np.uint64(bits), expanded.reshape(-1), sums)
    np.testing.assert_array_equal(sums[:16], want)
    for way in expanded:
        np.testing.assert_array_equal(way[lanes_set], values[3 : 3 + lanes_set.sum()])


@exact_kernel
def _pack(vector, values, bits, count, packed, stored):  # type: ignore[no-untyped-def]
    lanes_packed = lanes.pack_lanes(load(vector, values, 0), bits)
    store(packed, 0, lanes_packed)
    lanes.store_first(stored, 1, lanes_packed, count)


@pytest.mark.parametrize("vector", [I32x8, I32x16])
@pytest.mark.parametrize("bits", [0, 1, 0b1010_0110, 0b1000_0000, 0xFF, 0xFFFF, 0x8001])
def test_lanes_are_packed_in_their_order(vector: Vector, bits: int) -> None:
    """Some machines have an instruction for 16 lanes; elsewhere, 8 and 16 lanes are packed one by one."""
    values, stored = np.arange(100, 100 + vector.lanes, dtype=np.int32), np.full(20, -777, np.int32)
    want = [value for lane, value in enumerate(values) if bits >> lane & 1]
    packed = np.zeros(vector.lanes, np.int32)
    _pack(vector, values, np.uint64(bits), len(want), packed, stored)
    assert packed[: len(want)].tolist() == want
    assert stored.tolist() == [-777, *want, *[-777] * (19 - len(want))]
