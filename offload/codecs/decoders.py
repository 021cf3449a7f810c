"""Coded bytes become float32 while they are fetched, in compiled form: the values that `reference` gives."""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at, compiled_address
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES
from offload.codecs.bits import float_of_e4m3, read_float
from offload.codecs.blocks import decode_e4m3, decode_q4_0, decode_q8_0
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
)


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
    """Copy chosen rows together, as float32."""
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
    """Of a C function int64 (int64 rows, int64 num_rows, int64 head_dim, int64 out) that decodes wherever rows lie.

    rows: address of int64[num_rows], where each vector begins; out: address of float32[num_rows, head_dim], written.
    """
    return compiled_address(_READERS[form.name])
