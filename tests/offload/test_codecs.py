"""Formats of keys and values: their bytes agree with hand-written ones, and the compiled codec with the definition."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.codecs import reference
from offload.codecs.codec import KvCodec
from offload.codecs.formats import FORMATS, KvFormat
from offload.errors import CodecError

NAMES = tuple(FORMATS)


def one_block(*values: float) -> np.ndarray:
    """Return 32 values: these, then zeros."""
    return np.array([*values, *[0.0] * (32 - len(values))], np.float32)


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def both(name: str, vector: np.ndarray) -> bytes:
    """Return what the definition writes, after checking that the compiled encoder writes the same."""
    want = reference.encode(FORMATS[name], vector)
    codec = KvCodec(KvFormat.parse(name), len(vector))
    got = codec.encode(np.stack([vector, vector]))
    np.testing.assert_array_equal(got, np.concatenate([want, want]))
    return want.tobytes()


GOLDEN = {
    "q8_0, zeros": ("q8_0", one_block(), bytes(34)),
    "q8_0, negative zeros": ("q8_0", one_block() * np.float32(-1), bytes(34)),
    "q8_0, a scale of one": ("q8_0", one_block(127, -127, 1, -1), half(1) + bytes([127, 129, 1, 255]) + bytes(28)),
    # ties round away from zero, not to even: 0.5 -> 1, 2.5 -> 3
    "q8_0, ties": (
        "q8_0", one_block(127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997),
        half(1) + bytes([127, 1, 255, 2, 3, 253, 0]) + bytes(25),
    ),
    # values are multiplied by 1 / d of the float32 d = 1 / 127; as float16, d is 0.00787354
    "q8_0, the scale is rounded after its use": (
        "q8_0", one_block(1, 0.5), half(1 / 127) + bytes([127, 64]) + bytes(30),
    ),
    "q8_0, the largest scale": ("q8_0", one_block(65504 * 127), half(65504) + bytes([127]) + bytes(31)),
    # the scale underflows to 0 in float16: codes are those of the float32 scale, and decode to 0
    "q8_0, no scale": ("q8_0", one_block(1e-9, -1e-9), bytes(2) + bytes([127, 129]) + bytes(30)),
    "q8_0, no inverse": ("q8_0", one_block(1e-40), bytes(34)),
    "q4_0, zeros": ("q4_0", one_block(), half(-0.0) + b"\x88" * 16),
    "q4_0, negative zeros": ("q4_0", one_block() * np.float32(-1), half(-0.0) + b"\x88" * 16),
    # of +8 and -8 the first one sets the scale, to -1: 8 -> 0, and -8 -> 16, which is clipped to 15
    "q4_0, plus before minus": ("q4_0", one_block(8, -8), half(-1) + bytes([0x80, 0x8F]) + b"\x88" * 14),
    "q4_0, minus before plus": ("q4_0", one_block(-8, 8), half(1) + bytes([0x80, 0x8F]) + b"\x88" * 14),
    "q4_0, low and high halves": (
        "q4_0", np.concatenate([np.arange(-8, 8), -np.arange(-7, 9)]).astype(np.float32),
        half(1) + bytes(low | (15 - low) << 4 for low in range(16)),
    ),
    # x / d + 8.5 is truncated: halves round up
    "q4_0, ties": ("q4_0", one_block(-8, 0.5, -0.5, 1.5), half(1) + bytes([0x80, 0x89, 0x88, 0x8A]) + b"\x88" * 12),
    "q4_0, the largest scale": ("q4_0", one_block(-8 * 65504), half(65504) + b"\x80" + b"\x88" * 15),
    "fp8, zeros": ("fp8", one_block(), bytes(36)),
    # 448 is 0x7E; 1 is 0x38; the tie between 1 and 1.125 rounds to the even 1; 2 ** -9 is the smallest number
    "fp8": (
        "fp8", one_block(448, -448, 1, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10, -0.0, 2**-6, 2**-6 - 2**-10),
        np.float32(1).tobytes() + bytes([0x7E, 0xFE, 0x38, 0x38, 0x3A, 1, 0, 2, 0x80, 8, 8]) + bytes(21),
    ),
    "float16": ("float16", one_block(1, -2, 65519), half(1) + half(-2) + half(65504) + bytes(58)),
    "bfloat16": ("bfloat16", one_block(1, 1.00390625, 1.01171875), bytes.fromhex("803f 803f 823f") + bytes(58)),
    "float32": ("float32", one_block(1, -0.0), np.float32(1).tobytes() + bytes.fromhex("00000080") + bytes(120)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "vector", "want"), GOLDEN.values(), ids=GOLDEN)
def test_encoded_bytes_equal_hand_written_ones(name: str, vector: np.ndarray, want: bytes) -> None:
    assert both(name, vector) == want


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_codec_equals_the_definition(name: str, head_dim: int, rng: np.random.Generator) -> None:
    form = FORMATS[name]
    if head_dim % form.unit_len:
        with pytest.raises(CodecError, match=rf"head_dim is {head_dim}, but q._0 takes multiples of 32"):
            KvCodec(KvFormat.parse(name), head_dim)
        return
    kv = rng.standard_normal((2, 37, 2, head_dim), dtype=np.float32)
    kv *= np.exp(rng.normal(0, 3, (2, 37, 2, 1))).astype(np.float32)
    codec = KvCodec(KvFormat.parse(name), head_dim)
    coded = codec.encode(kv)
    parts = coded[..., : codec.v_offset], coded[..., codec.v_offset :]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, reference.encode(form, kv[..., i, :]))
        want = reference.decode(form, part, head_dim)
        np.testing.assert_array_equal(codec.decode(coded)[..., i, :].view(np.uint32), want.view(np.uint32))


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=32, max_size=32), st.sampled_from(NAMES))
def test_any_block_is_encoded_as_defined_and_decodes_within_its_error(values: list[float], name: str) -> None:
    vector = np.array(values, np.float32)
    back = reference.decode(FORMATS[name], np.frombuffer(both(name, vector), np.uint8), 32)
    largest = float(np.abs(vector).max())
    off = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "q8_0": 0.6 / 127, "q4_0": 1.01 / 8, "fp8": 1 / 27}
    np.testing.assert_allclose(back, vector, rtol=0, atol=off[name] * largest + 1e-5)


def test_a_rows_key_and_value_codes_are_concatenated(rng: np.random.Generator) -> None:
    kv = rng.standard_normal((9, 2, 64), dtype=np.float32)
    codec = KvCodec(KvFormat.parse("k=q8_0, v=q4_0"), 64)
    assert (codec.row_bytes, codec.v_offset) == (2 * 34 + 2 * 18, 2 * 34)
    want = [reference.encode(FORMATS[name], kv[:, i]) for i, name in enumerate(("q8_0", "q4_0"))]
    np.testing.assert_array_equal(codec.encode(kv), np.concatenate(want, axis=1))


@pytest.mark.parametrize(("name", "want"), [("q8_0", 34 / 64), ("q4_0", 18 / 64), ("fp8", 132 / 256), ("bfloat16", 1)])
def test_row_sizes_relative_to_float16(name: str, want: float) -> None:
    assert KvFormat.parse(name).row_bytes(128) / KvFormat.parse("float16").row_bytes(128) == want


def test_e4m3_equals_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    known = ~np.isnan(codes)
    np.testing.assert_array_equal(reference.E4M3[known], codes[known])
    values = np.concatenate([np.linspace(-448, 448, 30_001), np.linspace(-0.1, 0.1, 30_001)]).astype(np.float32)
    want = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(reference.to_e4m3(values), want)


def test_gathered_rows_equal_decoded_rows(rng: np.random.Generator) -> None:
    codec = KvCodec(KvFormat.parse("k=fp8,v=q4_0"), 32)
    coded = codec.encode(rng.standard_normal((50, 2, 32), dtype=np.float32))
    numbers = rng.integers(0, 50, 17)
    poisoned = np.full_like(coded, 0xFF)  # as a scale, NaN
    poisoned[numbers] = coded[numbers]
    np.testing.assert_array_equal(codec.gather(poisoned, numbers), codec.decode(coded)[numbers])
    assert codec.gather(coded, numbers[:0]).shape == (0, 2, 32)
    assert codec.encode(np.empty((0, 2, 32), np.float32)).shape == (0, codec.row_bytes)
    assert codec.decode(coded[:0]).shape == (0, 2, 32)


def test_concurrent_encoding_gives_the_same_bytes(rng: np.random.Generator) -> None:
    codec, kv = KvCodec(KvFormat.parse("q4_0"), 64), rng.standard_normal((4, 300, 2, 64), dtype=np.float32)
    got: dict[int, np.ndarray] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: codec.encode(kv[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(np.stack([got[i] for i in range(4)]), codec.encode(kv))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0, 0), (4, 1, 63)])
def test_nan_and_infinite_values_are_refused(name: str, bad: float, place: tuple[int, int, int]) -> None:
    kv = np.zeros((5, 2, 64), np.float32)
    kv[place] = bad
    with pytest.raises(
        CodecError, match=rf"NaN or infinite, which {name} cannot represent; .* build the context again"
    ):
        KvCodec(KvFormat.parse(name), 64).encode(kv)
    with pytest.raises(CodecError, match="NaN or infinite"):
        reference.encode(FORMATS[name], kv[:, place[1]])


@pytest.mark.parametrize(
    ("name", "value"), [("q8_0", 65520 * 127), ("q4_0", -65520 * 8), ("float16", 65520), ("bfloat16", 3.4e38)]
)
def test_values_whose_scale_overflows_are_refused(name: str, value: float) -> None:
    kv = np.zeros((5, 2, 64), np.float32)
    kv[2, 1, 40] = value
    for encode in (KvCodec(KvFormat.parse(name), 64).encode, lambda kv: reference.encode(FORMATS[name], kv[:, 1])):
        with pytest.raises(CodecError, match=rf"too large for {name}: .* choose float32 or fp8"):
            encode(kv)
    fp8 = KvCodec(KvFormat.parse("fp8"), 64)
    np.testing.assert_allclose(fp8.decode(fp8.encode(kv)), kv, rtol=1e-6)


@pytest.mark.parametrize("text", ["q5_1", "", "k=q8_0", "k=q8_0,v=", "q8_0,q4_0", "k=q8_0,v=q4_0,k=fp8", "v=fp8,x=fp8"])
def test_unknown_format_names_are_refused(text: str) -> None:
    with pytest.raises(CodecError, match=r"choose from|give one for both"):
        KvFormat.parse(text)


@pytest.mark.parametrize("text", ["q8_0", "k=q8_0,v=q4_0", "float32"])
def test_a_format_parses_from_its_own_text(text: str) -> None:
    assert str(KvFormat.parse(text)) == text
    assert KvFormat.parse("k=fp8,v=fp8") == KvFormat.parse("fp8")
