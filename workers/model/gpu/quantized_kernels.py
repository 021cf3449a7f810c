"""Products with weights of 8 or 4 bits, which are decoded in registers on their way to the tensor cores.

Decoded codes are exact in bfloat16, because a group's scale multiplies its sum, not its weights. `QuantizedWeight`
defines the layout: two or four codes in a word of 16 bits, each from another part of a run of 128 inputs.
"""

import triton
import triton.language as tl

RUN = tl.constexpr(128)

# Decode two words into pairs of bfloat16 numbers, one pair for each place of a code in a word. A code's bits are moved
# to bfloat16's mantissa and the lowest bits of its exponent; multiplying by a power of two, or subtracting a constant,
# then gives the code's value.
_FP8 = tl.constexpr("""{
.reg .b32 low, high, sign, scale, none;
mov.b32 scale, 0x7b807b80;
mov.b32 none, 0x80008000;
shl.b32 low, $2, 8;
and.b32 sign, low, 0x80008000;
shl.b32 low, $2, 4;
lop3.b32 low, low, 0x07f007f0, sign, 0xea;
fma.rn.bf16x2 $0, low, scale, none;
and.b32 sign, $2, 0x80008000;
shr.b32 high, $2, 4;
lop3.b32 high, high, 0x07f007f0, sign, 0xea;
fma.rn.bf16x2 $1, high, scale, none;
}""")
_INT4 = tl.constexpr("""{
.reg .b32 code, one, less;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
lop3.b32 code, $4, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, code, one, less;
shr.b32 code, $4, 4;
lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $1, code, one, less;
shr.b32 code, $4, 8;
lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $2, code, one, less;
shr.b32 code, $4, 12;
lop3.b32 code, code, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $3, code, one, less;
}""")


@triton.jit
def quantized_product(
    w_at,  # [BLOCK_N, 1] pointers to the rows of words
    x_at,  # [1, BLOCK_M] pointers to the rows of x
    scale_at,  # [BLOCK_N] pointers to the rows' scales of the first group
    there,  # [BLOCK_M]: which rows of x exist
    scales_len,  # stride from a group's scales to the next group's
    start,
    stop,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,  # the inputs are whole runs
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group; 0: all
    ZEROS: tl.constexpr,  # whether zero points differ from 8
    NATIVE: tl.constexpr,  # decode to bfloat16 by inline assembly
    DOT_PRECISION: tl.constexpr,
):
    """Return weights @ x.T over inputs from `start`, a multiple of RUN, to `stop`: [BLOCK_N, BLOCK_M] float32."""
    dtype = x_at.dtype.element_ty
    PARTS: tl.constexpr = 2 if FORMAT == "fp8" else 4
    WIDTH: tl.constexpr = RUN // PARTS
    SHORT: tl.constexpr = GROUP > 0 and GROUP < RUN
    j = tl.arange(0, WIDTH)
    nothing = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    ones = tl.full((BLOCK_N, WIDTH), 1.0, dtype)
    acc = nothing
    coming = tl.load(_scales_of(scale_at, start, stop, scales_len, GROUP))
    for at in range(start, stop, RUN):
        scales = coming  # loaded a run ahead by hand: Triton pipelines only the loads of operands
        coming = tl.load(_scales_of(scale_at, at + RUN, stop, scales_len, GROUP))
        words = tl.load(w_at + (at // PARTS + j)[None, :], eviction_policy="evict_first")
        numbers = _decoded(words, dtype, FORMAT, NATIVE)
        product, sums = nothing, nothing
        for part in tl.static_range(PARTS):
            k = at + part * WIDTH + j
            if EVEN_K:
                x = tl.load(x_at + k[:, None], mask=there[None, :], other=0.0)
            else:
                x = tl.load(x_at + k[:, None], mask=there[None, :] & (k < stop)[:, None], other=0.0)
            product = tl.dot(numbers[part], x, product, input_precision=DOT_PRECISION)
            if ZEROS:
                sums = tl.dot(ones, x, sums, input_precision=DOT_PRECISION)
            if SHORT and (part + 1) * WIDTH % GROUP == 0:
                of_group = tl.load(_scales_of(scale_at, at + part * WIDTH, stop, scales_len, GROUP))
                acc += _scaled(product, sums, of_group, FORMAT, ZEROS)
                product, sums = nothing, nothing
        if not SHORT:
            acc += _scaled(product, sums, scales, FORMAT, ZEROS)
    return acc


@triton.jit
def _scales_of(scale_at, at, stop, scales_len, GROUP: tl.constexpr):
    """Return pointers to the scales of an input's group; for inputs past the end, those of the last input's group."""
    return scale_at if GROUP == 0 else scale_at + tl.minimum(at, stop - 1) // GROUP * scales_len


@triton.jit
def _scaled(product, sums, scales, FORMAT: tl.constexpr, ZEROS: tl.constexpr):
    """scale * (product - zero * sums)"""
    if FORMAT == "int4":
        bits = scales.to(tl.int32, bitcast=True)
        if ZEROS:
            product -= ((bits & 15) - 8).to(tl.float32)[:, None] * sums
        scales = (bits & -16).to(tl.float32, bitcast=True)
    return scales[:, None] * product


@triton.jit
def _decoded(words, dtype: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Return one tensor for each place of a code in a word: the values of all words' codes in that place."""
    if NATIVE and FORMAT == "fp8":
        return tl.inline_asm_elementwise(
            _FP8, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif NATIVE:
        return tl.inline_asm_elementwise(
            _INT4,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif FORMAT == "fp8":
        return _number(words, 0, dtype, FORMAT), _number(words, 8, dtype, FORMAT)
    else:
        low, high = _number(words, 0, dtype, FORMAT), _number(words, 4, dtype, FORMAT)
        return low, high, _number(words, 8, dtype, FORMAT), _number(words, 12, dtype, FORMAT)


@triton.jit
def _number(words, shift: tl.constexpr, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return the value of the code at bit `shift`, decoded by way of float32: an FP8 code's sign, exponent and mantissa
    are moved to float32's, and a power of two corrects for the bias."""
    code = words.to(tl.uint32) >> shift
    if FORMAT == "fp8":
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    else:
        return ((code & 15).to(tl.float32) - 8.0).to(dtype)
