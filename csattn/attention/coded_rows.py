"""Attention in place over coded rows of a context: 16 keys or values at a time are decoded to float32.

The code that knows their format supplies a reader for keys and one for values. A reader is the address of a C function

    int64 read(int64 rows, int64 num_rows, int64 head_dim, int64 out)

    rows: address of int64[num_rows], the address of each key, or of each value
    out: address of float32[num_rows, head_dim], written

that any thread may call. It must not fail, must access no other bytes, and must write the same bits for a row whatever
rows it is called with. A request's own rows are plain. The result has the bits of attention to the decoded rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.attention.row_math import add_weighted_values, score_16
from csattn.cpu.addresses import array_at, call_stage
from csattn.cpu.floats import load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES, prefetch


@exact_kernel
def score_coded(
    q: NDArray[np.float32],
    rows: NDArray[np.int64],  # addresses; a multiple of 16
    num_context: int,  # the first so many rows are the context's; the others are plain rows of a request
    reader: int,  # of keys
    row_bytes: int,  # of a row of the context
    like: Any,  # has the type of plain rows
    head_dim: int,
    group_size: int,
    scale: float,
    scores: NDArray[np.float32],  # [group_size * len(rows)], written
) -> None:
    """scores[g * len(rows) + i] = scale * q[g] . k[i]"""
    room = len(rows)
    keys, places = _space_for_16(head_dim)
    for block in range(0, room, LANES):
        for i in range(block + LANES, min(block + 2 * LANES, room)):
            for byte in range(0, row_bytes, 64):
                prefetch(array_at(rows[i], row_bytes, np.uint8(0)), byte)
        _read_16(reader, rows, block, num_context, 0, 0, like, head_dim, keys)
        score_16(q, places, 0, np.float32(0), head_dim, group_size, scale, scores, block, room)


@exact_kernel
def add_coded_values(
    weights: NDArray[np.float32],  # [group_size * len(rows)]
    rows: NDArray[np.int64],  # as for `score_coded`
    num_context: int,
    reader: int,  # of values
    v_offset: int,  # bytes from the start of a row of the context to its value
    like: Any,
    itemsize: int,
    head_dim: int,
    group_size: int,
    parts: int,  # address of the first query head's [head_dim] sums
    part_bytes: int,  # from one query head's sums to the next's
) -> None:
    """Add the values, weighted by each query head's weights, to that head's sums."""
    room = len(rows)
    values, places = _space_for_16(head_dim)
    for block in range(0, room, LANES):
        _read_16(reader, rows, block, num_context, v_offset, head_dim * itemsize, like, head_dim, values)
        for g in range(group_size):
            part = array_at(parts + g * part_bytes, head_dim, np.float32(0))
            add_weighted_values(weights, g * room + block, places, LANES, 0, np.float32(0), head_dim, part)


@exact_kernel
def _space_for_16(head_dim: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Allocate memory for 16 keys or values; also return the address of each."""
    space, places = np.empty(LANES * head_dim, np.float32), np.empty(LANES, np.int64)
    for i in range(LANES):
        places[i] = space.ctypes.data + 4 * i * head_dim
    return space, places


@exact_kernel
def _read_16(
    reader: int,
    rows: NDArray[np.int64],  # the 16 rows from `first` on are read
    first: int,
    num_context: int,
    in_context: int,  # bytes from the start of a context's row to the key or value that is read
    in_tail: int,  # the same for a request's own row
    like: Any,
    head_dim: int,
    out: NDArray[np.float32],  # [16 * head_dim]
) -> None:
    """Read the keys, or the values, of 16 rows into out, one after another."""
    num_coded = min(max(num_context - first, 0), LANES)
    if num_coded > 0:
        places = np.empty(LANES, np.int64)
        for i in range(num_coded):
            places[i] = rows[first + i] + in_context
        call_stage(reader, places.ctypes.data, num_coded, head_dim, out.ctypes.data)
    for i in range(num_coded, LANES):
        plain = array_at(rows[first + i] + in_tail, head_dim, like)
        for j in range(head_dim):
            out[i * head_dim + j] = load_float(plain, j)
