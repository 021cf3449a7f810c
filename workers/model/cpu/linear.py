"""Products of a few rows with a weight matrix that is read once. A row's results do not depend on the rows beside it.

Each output is summed in 16 lanes, lane i over elements i, i + 16, ...; then over the lanes, in one fixed tree; then
over the remaining elements, one by one. Neither the number of rows nor that of threads changes this order.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import F32x4, load_float, load_floats, load_floats_of, sums_of_4, sums_of_16
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, part, with_part
from csattn.cpu.simd import LANES, TILE_LANES, F32x16, F32xTile, fill, load, prefetch_early, store

TILE = 4  # rows and outputs whose sums stay in registers


@exact_kernel
def products(
    x: NDArray[np.float32],  # [num_rows * num_in]
    num_rows: int,
    weight: Any,  # rows of num_in, row_stride apart, in any float type that csattn.cpu.floats reads
    row_stride: int,
    first: int,  # the first of the num_out outputs to compute
    num_out: int,  # 1 to 16
    num_in: int,
    sums: NDArray[np.float32],  # [num_rows, rounded up to TILE, * 16], written
) -> None:
    """sums[row * 16 + i] = x[row] @ weight[first + i]"""
    last, ahead = num_out - 1, TILE * row_stride
    for out in range(0, num_out, TILE):
        w0, w1 = (first + out) * row_stride, (first + min(out + 1, last)) * row_stride
        w2, w3 = (first + min(out + 2, last)) * row_stride, (first + min(out + 3, last)) * row_stride
        if num_rows == 1:
            _one_row(x, weight, w0, w1, w2, w3, num_in, ahead, sums, out)
        else:
            for row in range(0, num_rows, TILE):
                to_next = ahead if row == 0 else 0
                _four_rows(x, row, num_rows - 1, weight, w0, w1, w2, w3, num_in, to_next, sums, out)


@exact_kernel
def _one_row(x, weight, w0, w1, w2, w3, num_in, ahead, sums, out):  # type: ignore[no-untyped-def]
    """Write sums[out : out + 4] of the only row."""
    zero = fill(F32x16, 0.0)
    a, b, c, d = zero, zero, zero, zero
    whole = num_in - num_in % LANES
    for i in range(0, whole, LANES):
        prefetch_early(weight, w0 + i + ahead)
        prefetch_early(weight, w1 + i + ahead)
        prefetch_early(weight, w2 + i + ahead)
        prefetch_early(weight, w3 + i + ahead)
        xs = load(F32x16, x, i)
        a = fma(xs, load_floats(weight, w0 + i), a)
        b = fma(xs, load_floats(weight, w1 + i), b)
        c = fma(xs, load_floats(weight, w2 + i), c)
        d = fma(xs, load_floats(weight, w3 + i), d)
    four = sums_of_4(a, b, c, d)
    store(sums, out, part(F32x4, sums_of_16(four, four, four, four), 0))
    for i in range(whole, num_in):
        _add_products(x, i, weight, w0 + i, w1 + i, w2 + i, w3 + i, sums, out)


@exact_kernel
def _four_rows(x, row, last_row, weight, w0, w1, w2, w3, num_in, ahead, sums, out):  # type: ignore[no-untyped-def]
    """Write sums[(row + r) * 16 + out + c] for r and c from 0 to 3. Rows past the last one repeat it."""
    x0, x1 = row * num_in, min(row + 1, last_row) * num_in
    x2, x3 = min(row + 2, last_row) * num_in, min(row + 3, last_row) * num_in
    zero, none = fill(F32xTile, 0.0), fill(F32x16, 0.0)
    a, b, c, d = none, none, none, none
    whole = num_in - num_in % LANES
    for lane in range(0, LANES, TILE_LANES):
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        c0, c1, c2, c3 = zero, zero, zero, zero
        d0, d1, d2, d3 = zero, zero, zero, zero
        for i in range(lane, whole, LANES):
            if lane == 0:
                prefetch_early(weight, w0 + i + ahead)
                prefetch_early(weight, w1 + i + ahead)
                prefetch_early(weight, w2 + i + ahead)
                prefetch_early(weight, w3 + i + ahead)
            v0, v1 = load_floats_of(F32xTile, weight, w0 + i), load_floats_of(F32xTile, weight, w1 + i)
            v2, v3 = load_floats_of(F32xTile, weight, w2 + i), load_floats_of(F32xTile, weight, w3 + i)
            xs = load(F32xTile, x, x0 + i)
            a0, a1, a2, a3 = fma(xs, v0, a0), fma(xs, v1, a1), fma(xs, v2, a2), fma(xs, v3, a3)
            xs = load(F32xTile, x, x1 + i)
            b0, b1, b2, b3 = fma(xs, v0, b0), fma(xs, v1, b1), fma(xs, v2, b2), fma(xs, v3, b3)
            xs = load(F32xTile, x, x2 + i)
            c0, c1, c2, c3 = fma(xs, v0, c0), fma(xs, v1, c1), fma(xs, v2, c2), fma(xs, v3, c3)
            xs = load(F32xTile, x, x3 + i)
            d0, d1, d2, d3 = fma(xs, v0, d0), fma(xs, v1, d1), fma(xs, v2, d2), fma(xs, v3, d3)
        a, b = with_part(a, sums_of_4(a0, a1, a2, a3), lane), with_part(b, sums_of_4(b0, b1, b2, b3), lane)
        c, d = with_part(c, sums_of_4(c0, c1, c2, c3), lane), with_part(d, sums_of_4(d0, d1, d2, d3), lane)
    totals = sums_of_16(a, b, c, d)
    at = row * LANES + out
    store(sums, at, part(F32x4, totals, 0))
    store(sums, at + LANES, part(F32x4, totals, 1))
    store(sums, at + 2 * LANES, part(F32x4, totals, 2))
    store(sums, at + 3 * LANES, part(F32x4, totals, 3))
    for i in range(whole, num_in):
        _add_products(x, x0 + i, weight, w0 + i, w1 + i, w2 + i, w3 + i, sums, at)
        _add_products(x, x1 + i, weight, w0 + i, w1 + i, w2 + i, w3 + i, sums, at + LANES)
        _add_products(x, x2 + i, weight, w0 + i, w1 + i, w2 + i, w3 + i, sums, at + 2 * LANES)
        _add_products(x, x3 + i, weight, w0 + i, w1 + i, w2 + i, w3 + i, sums, at + 3 * LANES)


@exact_kernel
def add_up_rows(x, at, num_in, matrix, width, out):  # type: ignore[no-untyped-def]
    """out[j] = the sum over i < num_in of x[at + i] * matrix[i * width + j], in order of i. matrix: any float type."""
    whole = width - width % LANES
    for j in range(0, whole, LANES):
        sums = fill(F32x16, 0.0)
        for i in range(num_in):
            sums = fma(fill(F32x16, x[at + i]), load_floats(matrix, i * width + j), sums)
        store(out, j, sums)
    for j in range(whole, width):
        total = np.float32(0.0)
        for i in range(num_in):
            total += x[at + i] * load_float(matrix, i * width + j)
        out[j] = total


@exact_kernel
def _add_products(x, at_x, weight, w0, w1, w2, w3, sums, at):  # type: ignore[no-untyped-def]
    """Add the product of one element to four outputs."""
    sums[at] += x[at_x] * load_float(weight, w0)
    sums[at + 1] += x[at_x] * load_float(weight, w1)
    sums[at + 2] += x[at_x] * load_float(weight, w2)
    sums[at + 3] += x[at_x] * load_float(weight, w3)
