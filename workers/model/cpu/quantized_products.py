"""Products of rows with weights of 8 or 4 bits, with the bits of products with the same weights decoded to float32.

For one or two rows (if the inputs fill whole vectors), weights are decoded in registers, again for each row. Otherwise
they are decoded once, for four outputs at a time, into memory.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.floats import F32x4, sums_of_4, sums_of_16
from csattn.cpu.jit import exact_kernel, inlined_kernel
from csattn.cpu.lanes import fma, part
from csattn.cpu.simd import LANES, F32x16, I32x16, U16x16, as_bits, convert, fill, load, prefetch_early, store
from csattn.models.quantized_weight import RUN
from workers.model.cpu.linear import TILE, products

FORMATS = ("floats", "int4", "fp8", "fp4")
FLOATS, INT4, FP8, FP4 = range(4)
_SIGN, _SIGN_AND_CODE, _E4M3_TO_FLOAT = -(2**31), 0x87F00000 - 2**32, 2.0**120
_TWICE_E2M1 = 0xC8643210 - 2**32  # a table of twice an FP4 code's magnitude, 4 bits for each value of its low 3 bits
_HALF_OF_LEAST_E8M0 = 0x00200000  # 2**-128


@exact_kernel
def multiply(
    x: NDArray[np.float32],  # [num_rows * num_in]
    num_rows: int,
    format: int,  # an index of FORMATS
    group_size: int,  # of quantized weights
    weight: int,  # address of rows of num_in floats, row_stride apart, or of a `QuantizedWeight`'s words
    scales: int,  # address of a `QuantizedWeight`'s scales
    num_weights: int,  # all outputs of the `QuantizedWeight`: the stride from a group's scales to the next group's
    row_stride: int,
    first: int,  # the first of the num_out outputs to compute
    num_out: int,  # 1 to 16
    num_in: int,
    like: Any,  # an element of float weights
    sums: NDArray[np.float32],  # [num_rows, rounded up to TILE, * 16], written
) -> None:
    """sums[row * 16 + i] = x[row] @ weight[first + i]"""
    if format == FLOATS:
        products(x, num_rows, array_at(weight, num_in, like), row_stride, first, num_out, num_in, sums)
        return
    words, of_words = array_at(weight, num_in, np.uint16(0)), array_at(scales, num_weights, np.int32(0))
    if format == INT4:
        coded_products(x, num_rows, words, of_words, INT4, group_size, num_weights, first, num_out, num_in, sums)
    elif format == FP8:
        coded_products(x, num_rows, words, of_words, FP8, group_size, num_weights, first, num_out, num_in, sums)
    else:
        exponents = array_at(scales, num_weights, np.uint8(0))
        coded_products(x, num_rows, words, exponents, FP4, group_size, num_weights, first, num_out, num_in, sums)


@inlined_kernel
def coded_products(
    x: NDArray[np.float32],  # [num_rows * num_in]
    num_rows: int,
    words: NDArray[np.uint16],  # of a `QuantizedWeight` with num_weights outputs
    scales: NDArray[Any],  # of the same: uint8 exponents for FP4, the bits of floats as int32 for the others
    format: int,  # INT4, FP8 or FP4: a literal, for which the code is specialised
    group_size: int,
    num_weights: int,
    first: int,  # the first of the num_out outputs to compute
    num_out: int,  # 1 to 16
    num_in: int,
    sums: NDArray[np.float32],  # [num_rows, rounded up to TILE, * 16], written
) -> None:
    """sums[row * 16 + i] = x[row] @ weight[first + i]"""
    in_registers = num_rows <= 2 and num_in % LANES == 0
    decoded = np.empty(0 if in_registers else TILE * -(-num_in // RUN) * RUN, np.float32)
    for out in range(0, num_out, TILE):
        count = min(TILE, num_out - out)
        if in_registers:
            for row in range(num_rows):
                _one_row(
                    x, row * num_in, words, scales, format, group_size, num_weights, first + out, count - 1, num_in,
                    sums, row * LANES + out,
                )  # fmt: skip
            continue
        for i in range(count):
            _decode(words, scales, format, group_size, num_weights, first + out + i, num_in, decoded, i * num_in)
        products(x, num_rows, decoded, num_in, 0, count, num_in, sums[out:])


@inlined_kernel
def _words_of_run(format):  # type: ignore[no-untyped-def]
    """Return the words of a run, which is also the inputs of a part: neighbours with their codes in the same bits."""
    return RUN // 2 if format == FP8 else RUN // 4


@inlined_kernel
def _one_row(x, at_x, words, scales, format, group_size, num_weights, first, last, num_in, sums, to):  # type: ignore[no-untyped-def]
    """Write sums[to : to + 4] for the row at `at_x`. Outputs past the last one repeat it."""
    zero, num_words = fill(F32x16, 0.0), _words_of_run(format)
    o1, o2, o3 = first + min(1, last), first + min(2, last), first + min(3, last)
    num_runs, is_whole = -(-num_in // RUN), group_size % RUN == 0
    width = num_runs * num_words
    a, b, c, d = zero, zero, zero, zero
    for run in range(num_runs):
        size = min(RUN, num_in - run * RUN)
        w0, w1 = first * width + run * num_words, o1 * width + run * num_words
        w2, w3 = o2 * width + run * num_words, o3 * width + run * num_words
        for j in range(0, num_words, LANES):
            prefetch_early(words, w0 + j + TILE * width)
            prefetch_early(words, w1 + j + TILE * width)
            prefetch_early(words, w2 + j + TILE * width)
            prefetch_early(words, w3 + j + TILE * width)
        if size == RUN and is_whole:  # one group for the whole run: loops have constant bounds
            at = (run * RUN // group_size if group_size else 0) * num_weights
            s0, z0, s1, z1, s2, z2, s3, z3 = _four_scales(scales, at, first, o1, o2, o3, format)
            for p in range(RUN // num_words):
                at_part = at_x + run * RUN + p * num_words
                a, b, c, d = _add_part(
                    x, at_part, words, w0, w1, w2, w3, p, num_words, format, s0, z0, s1, z1, s2, z2, s3, z3, a, b, c, d
                )
            continue
        for p in range(-(-size // num_words)):
            at = ((run * RUN + p * num_words) // group_size if group_size else 0) * num_weights
            s0, z0, s1, z1, s2, z2, s3, z3 = _four_scales(scales, at, first, o1, o2, o3, format)
            at_part, count = at_x + run * RUN + p * num_words, min(num_words, size - p * num_words)
            a, b, c, d = _add_part(
                x, at_part, words, w0, w1, w2, w3, p, count, format, s0, z0, s1, z1, s2, z2, s3, z3, a, b, c, d
            )
    four = sums_of_4(a, b, c, d)
    store(sums, to, part(F32x4, sums_of_16(four, four, four, four), 0))


@inlined_kernel
def _four_scales(scales, at, o0, o1, o2, o3, format):  # type: ignore[no-untyped-def]
    """Return `_scale` of the groups of four outputs, one after another."""
    s0, z0 = _scale(scales[at + o0], format)
    s1, z1 = _scale(scales[at + o1], format)
    s2, z2 = _scale(scales[at + o2], format)
    s3, z3 = _scale(scales[at + o3], format)
    return s0, z0, s1, z1, s2, z2, s3, z3


@inlined_kernel
def _add_part(x, at_x, words, w0, w1, w2, w3, p, count, format, s0, z0, s1, z1, s2, z2, s3, z3, a, b, c, d):  # type: ignore[no-untyped-def]
    """Return the sums a, b, c, d of four outputs plus the first `count` inputs of the p-th part of a run."""
    for j in range(0, count, LANES):
        xs = load(F32x16, x, at_x + j)
        v0, v1 = convert(I32x16, load(U16x16, words, w0 + j)), convert(I32x16, load(U16x16, words, w1 + j))
        v2, v3 = convert(I32x16, load(U16x16, words, w2 + j)), convert(I32x16, load(U16x16, words, w3 + j))
        a, b = fma(xs, _weights(v0, p, format, s0, z0), a), fma(xs, _weights(v1, p, format, s1, z1), b)
        c, d = fma(xs, _weights(v2, p, format, s2, z2), c), fma(xs, _weights(v3, p, format, s3, z3), d)
    return a, b, c, d


@inlined_kernel
def _decode(words, scales, format, group_size, num_weights, weight, num_in, decoded, to):  # type: ignore[no-untyped-def]
    """decoded[to : to + num_in] = the weights of one output; what is written past them is undefined."""
    num_words, num_runs = _words_of_run(format), -(-num_in // RUN)
    for run in range(num_runs):
        at, to_run = (weight * num_runs + run) * num_words, to + run * RUN
        if group_size % RUN == 0:
            group = run * RUN // group_size if group_size else 0
            scale, offset = _scale(scales[group * num_weights + weight], format)
            for j in range(0, num_words, LANES):
                prefetch_early(words, at + j + TILE * num_runs * num_words)
                word = convert(I32x16, load(U16x16, words, at + j))
                for p in range(RUN // num_words):
                    store(decoded, to_run + p * num_words + j, _weights(word, p, format, scale, offset))
            continue
        for p in range(-(-min(RUN, num_in - run * RUN) // num_words)):  # a group consists of whole parts
            group = (run * RUN + p * num_words) // group_size
            scale, offset = _scale(scales[group * num_weights + weight], format)
            for j in range(0, num_words, LANES):
                word = convert(I32x16, load(U16x16, words, at + j))
                store(decoded, to_run + p * num_words + j, _weights(word, p, format, scale, offset))


@inlined_kernel
def _scale(bits, format):  # type: ignore[no-untyped-def]
    """Return a group's scale, and the offset for its zero point, which INT4 keeps in the lowest four bits of the scale.

    The scale of FP4 is halved: `_weights` multiplies it by twice the codes' values, which are integers.
    """
    if format == INT4:
        scale = as_bits(F32x16, fill(I32x16, bits & ~15))
        return scale, scale * fill(F32x16, -np.float32(bits & 15))
    if format == FP4:
        exponent = np.int32(bits)
        of_half = (exponent - 1) << 23 if exponent > 1 else _HALF_OF_LEAST_E8M0 << exponent
        return as_bits(F32x16, fill(I32x16, of_half)), fill(F32x16, 0.0)
    return as_bits(F32x16, fill(I32x16, bits)), fill(F32x16, 0.0)


@inlined_kernel
def _weights(word, part_of_run, format, scale, offset):  # type: ignore[no-untyped-def]
    """Return the weights of 16 neighbouring inputs, rounded once: a scale has few enough bits for an exact offset."""
    if format == INT4:
        code = (word >> fill(I32x16, 4 * part_of_run)) & fill(I32x16, 15)
        return fma(convert(F32x16, code), scale, offset)
    if format == FP4:
        shift = ((word << fill(I32x16, 2)) >> fill(I32x16, 4 * part_of_run)) & fill(I32x16, 28)
        twice = convert(F32x16, (fill(I32x16, _TWICE_E2M1) >> shift) & fill(I32x16, 15))
        sign = (word << fill(I32x16, 28 - 4 * part_of_run)) & fill(I32x16, _SIGN)
        return as_bits(F32x16, as_bits(I32x16, twice) | sign) * scale
    # e4m3's sign goes to float32's sign, its exponent to the low end of float32's; the factor corrects for the bias
    bits = ((word << fill(I32x16, 24 - 8 * part_of_run)) >> fill(I32x16, 4)) & fill(I32x16, _SIGN_AND_CODE)
    return as_bits(F32x16, bits) * fill(F32x16, _E4M3_TO_FLOAT) * scale
