"""Vectors become coded bytes, in compiled form: the bytes that `reference` gives."""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import ROUNDER
from csattn.cpu.jit import exact_kernel
from offload.codecs.bits import bits_of, float_of, write_float
from offload.codecs.blocks import largest_of_block, write_q4_0, write_q8_0
from offload.codecs.formats import (
    BFLOAT16,
    BLOCK_LEN,
    FLOAT16,
    FLOAT32,
    FP8_HEAD_BYTES,
    Q4_0,
    Q4_0_BYTES,
    Q8_0,
    Q8_0_BYTES,
)

DONE, NOT_FINITE, TOO_LARGE = range(3)

_INFINITE = np.uint32(0x7F800000)
_TOO_LARGE_FLOAT16 = np.float32(65520)  # rounds to infinity, and so does all above
_TOO_LARGE_BFLOAT16 = np.uint32(0x7F7F8000)


@exact_kernel
def encode_rows(
    k_number: int,  # the keys' format
    v_number: int,
    rows: NDArray[np.float32],  # [num_rows, 2, head_dim]
    coded: NDArray[np.uint8],  # [num_rows * row_bytes], written
    row_bytes: int,
    v_offset: int,
) -> tuple[int, int]:
    """DONE, or why rows cannot be written, and the number of the format that refuses: then some are written."""
    for i in range(len(rows)):
        status = _encode(k_number, rows[i, 0], coded, i * row_bytes)
        if status != DONE:
            return status, k_number
        status = _encode(v_number, rows[i, 1], coded, i * row_bytes + v_offset)
        if status != DONE:
            return status, v_number
    return DONE, k_number


@exact_kernel
def _encode(number: int, x: NDArray[np.float32], out: NDArray[np.uint8], at: int) -> int:
    """Write a vector's bytes from byte `at` on."""
    largest = _largest_bits(x)
    if largest >= _INFINITE:
        return NOT_FINITE
    if number == FLOAT32:
        for j in range(len(x)):
            write_float(out, at + 4 * j, np.float32(0), x[j])
    elif number == BFLOAT16:
        if largest >= _TOO_LARGE_BFLOAT16:
            return TOO_LARGE
        for j in range(len(x)):
            write_float(out, at + 2 * j, np.uint16(0), x[j])
    elif number == FLOAT16:
        if largest >= bits_of(_TOO_LARGE_FLOAT16):
            return TOO_LARGE
        for j in range(len(x)):
            write_float(out, at + 2 * j, np.int16(0), x[j])
    elif number == Q8_0:
        for block in range(len(x) // BLOCK_LEN):
            if not _encode_q8_0(x, block * BLOCK_LEN, out, at + block * Q8_0_BYTES):
                return TOO_LARGE
    elif number == Q4_0:
        for block in range(len(x) // BLOCK_LEN):
            if not _encode_q4_0(x, block * BLOCK_LEN, out, at + block * Q4_0_BYTES):
                return TOO_LARGE
    else:
        _encode_fp8(x, float_of(largest), out, at)
    return DONE


@exact_kernel
def _largest_bits(x: NDArray[np.float32]) -> np.uint32:
    """Of the absolute values: floats without a sign are ordered as their bits are, NaN above infinity."""
    largest = np.uint32(0)
    for j in range(len(x)):
        largest = max(largest, np.uint32(bits_of(x[j]) & np.uint32(0x7FFFFFFF)))
    return largest


@exact_kernel
def _inverse(d: np.float32) -> np.float32:
    inverse = np.float32(1) / d
    return inverse if abs(inverse) < np.float32(np.inf) else np.float32(0)


@exact_kernel
def _encode_q8_0(x: NDArray[np.float32], first: int, out: NDArray[np.uint8], at: int) -> bool:
    d = abs(largest_of_block(x, first)) / np.float32(127)
    if d >= _TOO_LARGE_FLOAT16:
        return False
    write_float(out, at, np.int16(0), d)
    write_q8_0(x, first, out, at + 2, _inverse(d))
    return True


@exact_kernel
def _encode_q4_0(x: NDArray[np.float32], first: int, out: NDArray[np.uint8], at: int) -> bool:
    d = (largest_of_block(x, first) + np.float32(0)) / np.float32(-8)  # -0.0 counts as 0.0
    if abs(d) >= _TOO_LARGE_FLOAT16:
        return False
    write_float(out, at, np.int16(0), d)
    write_q4_0(x, first, out, at + 2, _inverse(d))
    return True


@exact_kernel
def _encode_fp8(x: NDArray[np.float32], largest: np.float32, out: NDArray[np.uint8], at: int) -> None:
    d = largest / np.float32(448)
    write_float(out, at, np.float32(0), d)
    inverse = _inverse(d)
    for j in range(len(x)):
        scaled = x[j] * inverse
        bits = bits_of(scaled)
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        # normal numbers lose 20 bits of mantissa, ties to even; below 2 ** -6 the codes count 2 ** -9
        odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
        normal = np.uint32((magnitude + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
        small = np.uint32((abs(scaled) * np.float32(512) + ROUNDER) - ROUNDER)
        code = small if magnitude < np.uint32(121 << 23) else min(normal, np.uint32(0x7E))
        out[at + FP8_HEAD_BYTES + j] = np.uint8(code | np.uint32((bits >> np.uint32(24)) & np.uint32(0x80)))
