"""Attention on the device to coded rows equals, bit for bit, attention to the decoded rows, and reads no others."""

from dataclasses import replace

import pytest
import torch

from csattn.attention import device
from csattn.attention.device import DeviceAttention, RowCoding
from csattn.errors import ConfigError
from csattn.rest import moments_of
from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from tests.ampere import skip_where_refused
from tests.attention.device_steps import Shape, Step, attend_on_device, make_kv, make_step
from tests.attention.test_device import CONTEXTS, MIXED
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import crossed


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the kernels on the CPU if there is no device."""
    emulator.stand_in(monkeypatch, device, multiprocessors=5)


def code(step: Step, text: str) -> tuple[Step, Step]:
    """Return the step with its contexts' rows coded, and the step over the decoded rows.

    Rows of NaN decode to NaN, and so do the bytes between one row and the next.
    """
    codec = KvCodec(KvFormat.parse(text), step.shape.head_dim)
    row_bytes = -(-codec.row_bytes // 16) * 16
    sides: dict[str, list[torch.Tensor]] = {}
    plain: dict[str, list[torch.Tensor]] = {}
    for name in ("far", "spill", "resident"):
        sides[name], plain[name] = [], []
        for kv in getattr(step, name):
            coded = torch.from_numpy(codec.encode(kv.float().nan_to_num().numpy()))
            coded[kv[:, :, 0, 0].isnan()] = 0xFF
            padded = torch.full((*kv.shape[:2], row_bytes), 0xFF, dtype=torch.uint8)
            padded[:, :, : codec.row_bytes] = coded
            sides[name].append(padded)
            plain[name].append(torch.from_numpy(codec.decode(coded.numpy())).to(kv.dtype))
            assert torch.equal(plain[name][-1].isnan().any(-1).any(-1), kv[:, :, 0, 0].isnan())
    coding = RowCoding(k=codec.form.k.name, v=codec.form.v.name, v_offset=codec.v_offset, row_bytes=row_bytes)
    return replace(step, **sides, coding=coding), replace(step, **plain)


FORMS = [
    ("q8_0", 128),
    ("q8_0", 512),
    ("q4_0", 32),
    ("fp8", 80),
    ("k=q8_0,v=q4_0", 64),
    ("k=fp8,v=q8_0", 256),
    ("k=q4_0,v=fp8", 32),
    ("k=float16,v=bfloat16", 16),
]


@pytest.mark.parametrize(("text", "head_dim", "dtype"), crossed(FORMS, [torch.float32, torch.float16, torch.bfloat16]))
def test_device_attention_to_coded_rows_has_the_bits_of_decoded_ones(
    text: str, head_dim: int, dtype: torch.dtype
) -> None:
    skip_where_refused(head_dim, dtype)
    shape = Shape(num_q_heads=6, head_dim=head_dim, dtype=dtype)
    coded, plain = code(make_step(shape, CONTEXTS, MIXED, num_spilled=3), text)
    got = attend_on_device(coded)
    assert torch.equal(got, attend_on_device(plain))
    assert not got[[i for i, (context, _, _) in enumerate(MIXED) if context >= 0]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimates_of_rows_are_the_same_for_coded_contexts(dtype: torch.dtype) -> None:
    """Moments of the estimated rows take part in the same attention as rows, but are not coded."""
    shape = Shape(head_dim=32, dtype=dtype)
    step = make_step(shape, CONTEXTS, MIXED)
    moments = [(moments_of([make_kv(shape, 50).float()]), 400) for _ in CONTEXTS]
    coded, plain = code(replace(step, moments=moments), "q8_0")
    assert torch.equal(attend_on_device(coded), attend_on_device(plain))


@pytest.mark.parametrize("fill", [0.0, 1e-30, 3e38])
def test_tiny_and_huge_fp8_values_decode_as_on_the_cpu(fill: float) -> None:
    """Scales of FP8 span all of float32: codes and products may be subnormal or zero."""
    shape = Shape(num_q_heads=2, head_dim=16, max_top_k=16)
    step = make_step(shape, [(16, 1)], [(0, 1, 16)])
    for kv in (*step.far, *step.resident):
        kv[..., 1, :] = fill * torch.rand(kv.shape[0], kv.shape[1], 16) ** 12
    step.tails[..., 1, :] = 0.0
    coded, plain = code(step, "k=float32,v=fp8")
    assert torch.equal(attend_on_device(coded), attend_on_device(plain))


def test_a_coded_format_larger_than_a_plain_row_is_refused() -> None:
    coding = RowCoding(k="float32", v="float32", v_offset=256, row_bytes=512)
    with pytest.raises(ConfigError, match=r"takes 512 bytes and a plain one 256; choose a format with fewer bytes"):
        DeviceAttention(
            batch_size=1, num_q_heads=2, num_kv_heads=2, num_index_heads=2, head_dim=64, dtype=torch.bfloat16,
            max_top_k=1, tail_capacity=1, softmax_scale=1.0, device=torch.device("cuda"),
            coding=coding,
        )  # fmt: skip
