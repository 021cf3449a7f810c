"""Compiled encoders and decoders of vectors, and of rows of a key and a value; byte for byte as `reference`."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import Stage, array_at, compiled_address
from csattn.cpu.floats import ROUNDER
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES
from offload.codecs.bits import bits_of, float_of, float_of_e4m3, read_float, write_float
from offload.codecs.blocks import decode_e4m3, decode_q4_0, decode_q8_0, largest_of_block, write_q4_0, write_q8_0
from offload.codecs.formats import (
    BFLOAT16,
    BLOCK_LEN,
    FLOAT16,
    FLOAT32,
    FORMATS,
    FP8_HEAD_BYTES,
    Q4_0,
    Q4_0_BYTES,
    Q8_0,
    Q8_0_BYTES,
    Format,
    KvFormat,
    not_finite,
    too_large,
)

DONE, NOT_FINITE, TOO_LARGE = range(3)
_PIECE_ROWS = 4096  # rows that a thread encodes at a time
_INFINITE = np.uint32(0x7F800000)
_TOO_LARGE_FLOAT16 = np.float32(65520)  # this and all above rounds to infinity
_TOO_LARGE_BFLOAT16 = np.uint32(0x7F7F8000)


@dataclass(frozen=True, slots=True)
class KvCodec:
    """A codec of rows of one head_dim: a coded row is the key's bytes in one format, then the value's in another.

    Definition: `reference`. Calls release the GIL, and any number may run at the same time.
    """

    form: KvFormat
    head_dim: int

    def __post_init__(self) -> None:
        self.form.row_bytes(self.head_dim)  # refuses a head_dim that does not fit

    @property
    def row_bytes(self) -> int:
        return self.form.row_bytes(self.head_dim)

    @property
    def v_offset(self) -> int:
        """The offset of the value in a coded row, in bytes."""
        return self.form.v_offset(self.head_dim)

    @property
    def readers(self) -> tuple[int, int]:
        """The addresses of the functions that decode keys and values in place: see `reader_address`."""
        return reader_address(self.form.k), reader_address(self.form.v)

    def encode(self, kv: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Encode [..., 2, head_dim] float32 to [..., row_bytes]. Raises CodecError for values that do not fit."""
        assert kv.dtype == np.float32 and kv.shape[-2:] == (2, self.head_dim), f"got {kv.shape} of {kv.dtype}"
        coded = np.empty((*kv.shape[:-2], self.row_bytes), np.uint8)
        rows, flat = np.ascontiguousarray(kv).reshape(-1, 2, self.head_dim), coded.reshape(-1)
        k, v = self.form.k, self.form.v
        status, refusing = encode_rows(k.number, v.number, rows, flat, self.row_bytes, self.v_offset)
        if status != DONE:
            form = k if refusing == k.number else v
            raise not_finite(form) if status == NOT_FINITE else too_large(form)
        return coded

    def decode(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Decode [..., row_bytes] to [..., 2, head_dim] float32."""
        flat = np.ascontiguousarray(rows).reshape(-1)
        numbers = np.arange(flat.size // self.row_bytes)
        return self.gather(flat, numbers).reshape(*rows.shape[:-1], 2, self.head_dim)

    def gather(self, rows: NDArray[np.uint8], numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decode rows numbers[i] of the contiguous coded rows in `rows`: [len(numbers), 2, head_dim] float32."""
        out = np.empty((len(numbers), 2, self.head_dim), np.float32)
        k, v = self.form.k.number, self.form.v.number
        gather_rows(k, v, rows.reshape(-1), self.row_bytes, self.v_offset, numbers, out)
        return out


def encode_layer(
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim] of any float dtype
    codec: KvCodec,
    out: Tensor | None = None,  # like the result, to be written; its rows may be longer: their last bytes do not change
) -> Tensor:
    """Encode the KV of a layer to [num_kv_heads, context_len, row_bytes] uint8.

    Piece by piece, so that it is never copied as a whole in float32. Raises CodecError for values that do not fit.
    """
    num_kv_heads, context_len = kv.shape[:2]
    coded = torch.empty(num_kv_heads, context_len, codec.row_bytes, dtype=torch.uint8) if out is None else out
    pieces = [(head, first) for head in range(num_kv_heads) for first in range(0, context_len, _PIECE_ROWS)]

    def encode(piece: tuple[int, int]) -> None:
        head, first = piece
        rows = slice(first, first + _PIECE_ROWS)
        coded[head, rows, : codec.row_bytes] = torch.from_numpy(codec.encode(kv[head, rows].float().numpy()))

    with ThreadPoolExecutor(_num_cpus()) as pool:
        for _ in pool.map(encode, pieces):
            pass
    return coded


def _num_cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@exact_kernel
def gather_rows(
    k_number: int,  # the keys' format
    v_number: int,
    coded: NDArray[np.uint8],  # [num_rows * row_bytes]
    row_bytes: int,
    v_offset: int,
    row_numbers: NDArray[np.int64],  # [num_chosen]
    out: NDArray[np.float32],  # [num_chosen, 2, head_dim], written
) -> None:
    """Decode chosen rows into contiguous memory."""
    head_dim = out.shape[2]
    for i in range(len(row_numbers)):
        at = row_numbers[i] * row_bytes
        decode_vector(k_number, coded, at, head_dim, out[i, 0])
        decode_vector(v_number, coded, at + v_offset, head_dim, out[i, 1])


@exact_kernel
def decode_vector(number: int, coded: NDArray[np.uint8], at: int, head_dim: int, out: NDArray[np.float32]) -> None:
    """out[:head_dim] = the vector that begins at byte `at`."""
    if number == FLOAT32:
        for j in range(head_dim):
            out[j] = read_float(coded, at + 4 * j, np.float32(0))
    elif number == BFLOAT16:
        for j in range(head_dim):
            out[j] = read_float(coded, at + 2 * j, np.uint16(0))
    elif number == FLOAT16:
        for j in range(head_dim):
            out[j] = read_float(coded, at + 2 * j, np.int16(0))
    elif number == Q8_0:
        for block in range(head_dim // BLOCK_LEN):
            decode_q8_0(coded, at + Q8_0_BYTES * block, out, BLOCK_LEN * block)
    elif number == Q4_0:
        for block in range(head_dim // BLOCK_LEN):
            decode_q4_0(coded, at + Q4_0_BYTES * block, out, BLOCK_LEN * block)
    else:
        d, whole = read_float(coded, at, np.float32(0)), head_dim - head_dim % LANES
        for j in range(0, whole, LANES):
            decode_e4m3(coded, at + FP8_HEAD_BYTES + j, out, j, d)
        for j in range(whole, head_dim):
            out[j] = float_of_e4m3(coded[at + FP8_HEAD_BYTES + j]) * d


def _reader_of(form: Format) -> Stage:
    number, head_bytes, unit_len, unit_bytes = form.number, form.head_bytes, form.unit_len, form.unit_bytes

    def read(rows: int, num_rows: int, head_dim: int, out: int) -> int:
        places, num_bytes = array_at(rows, num_rows, np.int64(0)), head_bytes + head_dim // unit_len * unit_bytes
        for i in range(num_rows):
            vector = array_at(out + 4 * head_dim * i, head_dim, np.float32(0))
            decode_vector(number, array_at(places[i], num_bytes, np.uint8(0)), 0, head_dim, vector)
        return 0

    return read


_READERS = {name: _reader_of(form) for name, form in FORMATS.items()}


def reader_address(form: Format) -> int:
    """Return the address of a C function int64 (int64 rows, int64 num_rows, int64 head_dim, int64 out) that decodes.

    rows: address of int64[num_rows], the addresses of the coded vectors, which may lie anywhere; out: address of
    float32[num_rows, head_dim], written.
    """
    return compiled_address(_READERS[form.name])


@exact_kernel
def encode_rows(
    k_number: int,  # the keys' format
    v_number: int,
    rows: NDArray[np.float32],  # [num_rows, 2, head_dim]
    coded: NDArray[np.uint8],  # [num_rows * row_bytes], written
    row_bytes: int,
    v_offset: int,
) -> tuple[int, int]:
    """Encode rows; return DONE, or the reason of a failure, and the number of the format that caused it.

    After a failure some rows have been written.
    """
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
    """Write a vector's bytes from byte `at` on; return DONE or the reason of a failure."""
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
    """Return the bits of the largest absolute value; nonnegative floats order as their bits do, NaN above infinity."""
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
        # normal numbers drop 20 bits of mantissa, ties to even; below 2 ** -6, codes are multiples of 2 ** -9
        odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
        normal = np.uint32((magnitude + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
        small = np.uint32((abs(scaled) * np.float32(512) + ROUNDER) - ROUNDER)
        code = small if magnitude < np.uint32(121 << 23) else min(normal, np.uint32(0x7E))
        out[at + FP8_HEAD_BYTES + j] = np.uint8(code | np.uint32((bits >> np.uint32(24)) & np.uint32(0x80)))
