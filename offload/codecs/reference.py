"""The definition of the formats, in plain numpy: every faster encoder and decoder agrees with it byte for byte.

Q8_0 and Q4_0 are those of llama.cpp (ggml-quants.c), with every operation rounded to float32:

    q8_0  34 bytes for 32 values: d as float16, then 32 int8 q; x = q * d
    q4_0  18 bytes for 32 values: d as float16, then 16 bytes: byte j has q of value j in its low half, and of value
          j + 16 in its high half; x = (q - 8) * d
    fp8   4 + head_dim bytes: d as float32, then a byte e4m3 (OCP FP8: 4 bits of exponent, 3 of mantissa, up to 448) for
          each value; x = e4m3 * d. One scale serves the whole vector: the exponent already gives what integers gain
          from a finer scale, so blocks would only cost bytes.

Vectors must be finite. If 1 / d overflows float32 (values below 1e-36), every code is that of 0. A scale that overflows
float16, where llama.cpp would write infinity, is refused: it takes values beyond 8 million in Q8_0 or half a million in
Q4_0, which no model's keys reach. A scale that underflows float16 is 0, and so is its block, as in llama.cpp: blocks
of values up to 3.7e-6 in Q8_0 and 2.3e-7 in Q4_0. Up to 0.007 and 0.0004, the scale is subnormal and has fewer bits.
"""

import numpy as np
from numpy.typing import NDArray

from offload.codecs.formats import BLOCK_LEN, FP8_HEAD_BYTES, Q4_0_BYTES, Q8_0_BYTES, Format, not_finite, too_large

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LARGEST_E4M3 = 448.0


def encode(form: Format, values: Floats) -> Bytes:
    """Encode [..., head_dim] float32 to [..., num_bytes] uint8. Raises CodecError for values that do not fit."""
    form.num_bytes(values.shape[-1])
    if not np.isfinite(values).all():
        raise not_finite(form)
    with np.errstate(over="ignore"):
        match form.name:
            case "float32":
                return _as_bytes(values)
            case "bfloat16":
                return _encode_bfloat16(form, values)
            case "float16":
                return _as_bytes(_require_finite(form, values.astype(np.float16)))
            case "q8_0":
                return _encode_q8_0(form, values)
            case "q4_0":
                return _encode_q4_0(form, values)
            case _:
                return _encode_fp8(values)


def decode(form: Format, coded: Bytes, head_dim: int) -> Floats:
    """Decode [..., num_bytes] uint8 to [..., head_dim] float32."""
    match form.name:
        case "float32":
            return np.ascontiguousarray(coded).view(np.float32)
        case "bfloat16":
            return (np.ascontiguousarray(coded).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "float16":
            return np.ascontiguousarray(coded).view(np.float16).astype(np.float32)
        case "q8_0":
            blocks = coded.reshape(*coded.shape[:-1], -1, Q8_0_BYTES)
            q = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
        case "q4_0":
            blocks = coded.reshape(*coded.shape[:-1], -1, Q4_0_BYTES)
            pairs = blocks[..., 2:].astype(np.int8)
            q = np.concatenate([pairs & 15, pairs >> 4 & 15], axis=-1) - np.int8(8)
        case _:
            d = np.ascontiguousarray(coded[..., :FP8_HEAD_BYTES]).view(np.float32)
            return E4M3[coded[..., FP8_HEAD_BYTES:]] * d
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return (q.astype(np.float32) * d).reshape(*coded.shape[:-1], head_dim)


def _encode_bfloat16(form: Format, values: Floats) -> Bytes:
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if ((rounded & 0x7FFF) == 0x7F80).any():
        raise too_large(form)
    return _as_bytes(rounded)


def _encode_q8_0(form: Format, values: Floats) -> Bytes:
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK_LEN)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(d)
    whole = np.trunc(scaled)
    q = whole + np.where(np.abs(scaled - whole) >= 0.5, np.copysign(np.float32(1), scaled), 0)  # half away from zero
    return _join(_require_finite(form, d.astype(np.float16)), q.astype(np.int8))


def _encode_q4_0(form: Format, values: Floats) -> Bytes:
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK_LEN)
    first = np.abs(blocks).argmax(-1, keepdims=True)  # on ties the first value's sign counts
    d = (np.take_along_axis(blocks, first, -1) + np.float32(0)) / np.float32(-8)  # -0.0 counts as 0.0
    q = np.minimum(15, (blocks * _inverse(d) + np.float32(8.5)).astype(np.uint8))
    pairs = q[..., : BLOCK_LEN // 2] | q[..., BLOCK_LEN // 2 :] << 4
    return _join(_require_finite(form, d.astype(np.float16)), pairs)


def _encode_fp8(values: Floats) -> Bytes:
    d = np.abs(values).max(-1, keepdims=True) / np.float32(LARGEST_E4M3)
    return _join(d, to_e4m3(values * _inverse(d)), blocks=False)


def to_e4m3(x: Floats) -> Bytes:
    """Round values up to 448, or a little beyond, to the nearest e4m3, ties to even."""
    _, exponent = np.frexp(np.abs(x))  # abs(x) is in [2 ** (exponent - 1), 2 ** exponent)
    exponent = np.where(x == 0, -6, np.maximum(exponent - 1, -6))
    eighths = np.rint(np.ldexp(np.abs(x), 3 - exponent)).astype(np.int32)  # 8 ... 16 where normal, else 0 ... 8
    code = np.minimum(8 * (exponent + 6) + eighths, 0x7E)
    signed: Bytes = (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return signed


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, eighths = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, eighths * 2.0**-9, (8 + eighths) * 2.0 ** (exponent - 10.0))
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3_values()  # by code; 0x7F and 0xFF are never written


def _inverse(d: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _require_finite(form: Format, halves: NDArray[np.float16]) -> NDArray[np.float16]:
    if not np.isfinite(halves).all():
        raise too_large(form)
    return halves


def _as_bytes(array: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8)


def _join(d: NDArray[np.generic], codes: NDArray[np.generic], blocks: bool = True) -> Bytes:
    joined = np.concatenate([_as_bytes(d), _as_bytes(codes)], axis=-1)
    return joined.reshape(*joined.shape[:-2], -1) if blocks else joined
