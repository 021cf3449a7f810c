"""The tensor-core kernel for many heads computes the definition's attention, and reads no row that is not chosen."""

import pytest
import torch
from torch import Tensor

from csattn.lightning import sparse_mla_reference
from csattn.lightning.mla import hopper
from csattn.lightning.mla.hopper import attend_many, supports
from csattn.lightning.mla.rows import SelectedRows
from tests.cuda_on_cpu.emulated import DEVICE, Emulator

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
SCALE = 0.05
NUM_ROWS = 400


@pytest.fixture(autouse=True)
def kernels(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, hopper)


def make_case(
    num_heads: int, lens: list[int], top_k: int, rope_dim: int, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Return one query per length: so many slots, one of them a hole if there are three, then -1. Others are NaN."""
    indices = torch.full((len(lens), top_k), -1, dtype=torch.int32)
    for query, num_chosen in enumerate(lens):
        indices[query, :num_chosen] = torch.randperm(NUM_ROWS)[:num_chosen].sort().values
        if num_chosen > 2:
            indices[query, num_chosen // 2] = NUM_ROWS + query
    used = torch.zeros(NUM_ROWS, 1, dtype=torch.bool)
    used[indices[(indices >= 0) & (indices < NUM_ROWS)].long()] = True
    rows = torch.randn(NUM_ROWS, 512 + rope_dim).to(dtype).where(used, torch.nan)
    case = {
        "q_nope": torch.randn(len(lens), num_heads, 512).to(dtype),
        "q_pe": torch.randn(len(lens), num_heads, rope_dim).to(dtype) if rope_dim else None,
        "ckv": rows[:, :512],
        "kpe": rows[:, 512:] if rope_dim else None,
        "indices": indices,
    }
    return {name: None if array is None else array.to(DEVICE) for name, array in case.items()}


@pytest.mark.parametrize(
    ("num_heads", "rope_dim", "with_sink", "dtype"),
    [(64, 64, False, torch.bfloat16), (64, 0, True, torch.bfloat16), (40, 64, True, torch.float16)],
)
def test_the_hopper_kernel_equals_the_definition(
    num_heads: int, rope_dim: int, with_sink: bool, dtype: torch.dtype
) -> None:
    case = make_case(num_heads, [0, 1, 64, 65, 200], 203, rope_dim, dtype)
    sink = torch.randn(num_heads).to(DEVICE) if with_sink else None
    if sink is not None:
        sink[3] = -torch.inf  # a head without a sink; the first query has no rows
    want, want_lse = sparse_mla_reference(**case, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    out, lse = torch.full_like(want, torch.nan), torch.full_like(want_lse, torch.nan)
    attend_many(SelectedRows(**case, softmax_scale=SCALE, attn_sink=sink), out, lse)  # type: ignore[arg-type]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(out.float(), want.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


def test_growing_logits_are_rescaled_in_the_online_softmax() -> None:
    """Each tile's logits far exceed those of earlier tiles, so the online softmax rescales its sums every time."""
    case = make_case(64, [200], 200, 64, torch.float16)
    growing = torch.linspace(0, 60, NUM_ROWS, device=DEVICE)[:, None]
    case["ckv"] = (case["ckv"] + growing).to(torch.float16)  # type: ignore[operator]
    case["q_nope"] = (case["q_nope"].abs() * 0.3).to(torch.float16)  # type: ignore[union-attr]
    want, want_lse = sparse_mla_reference(**case, softmax_scale=SCALE)  # type: ignore[arg-type]
    out, lse = torch.full_like(want, torch.nan), torch.full_like(want_lse, torch.nan)
    attend_many(SelectedRows(**case, softmax_scale=SCALE), out, lse)  # type: ignore[arg-type]
    torch.testing.assert_close(out.float(), want.float(), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("with_sink", [False, True])
def test_log_sum_exp_of_nan_or_infinite_inputs_equals_the_definitions(with_sink: bool) -> None:
    case = make_case(64, [200, 200], 200, 64, torch.bfloat16)
    case["q_nope"][0, 5] = torch.nan  # type: ignore[index]
    case["q_pe"][0, 7] = torch.inf  # type: ignore[index]
    case["kpe"][case["indices"][1, 70], 3] = torch.nan  # type: ignore[index]
    sink = torch.randn(64).to(DEVICE) if with_sink else None
    want, want_lse = sparse_mla_reference(**case, softmax_scale=SCALE, attn_sink=sink)  # type: ignore[arg-type]
    out, lse = torch.zeros_like(want), torch.zeros_like(want_lse)
    attend_many(SelectedRows(**case, softmax_scale=SCALE, attn_sink=sink), out, lse)  # type: ignore[arg-type]
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert torch.equal(out.isnan(), want.isnan())


def test_the_hopper_kernel_supports_only_many_heads_and_queries_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "has_warpgroup_products", lambda device: True)
    case = make_case(64, [1], 1, 64, torch.bfloat16)
    ckv, kpe, indices = case["ckv"], case["kpe"], case["indices"]

    def supported(*arrays: object) -> bool:
        return supports(SelectedRows(*arrays, indices, SCALE))  # type: ignore[arg-type]

    q, q_pe = (case[name].expand(64, -1, -1).contiguous() for name in ("q_nope", "q_pe"))  # type: ignore[union-attr]
    assert supported(q, q_pe, ckv, kpe)
    assert supported(q, None, ckv, None)
    assert not supported(q[:63], q_pe[:63], ckv, kpe), "few queries"
    assert not supported(q[:, :32], q_pe[:, :32], ckv, kpe), "few heads"
    assert not supported(q.float(), q_pe.float(), ckv, kpe), "float32"
    assert not supported(q[..., :256], None, ckv[:, :256], None), "other widths"  # type: ignore[index]
    uneven = torch.zeros(NUM_ROWS, 68, dtype=q.dtype, device=DEVICE)[:, :64]
    assert not supported(q, q_pe, ckv, uneven), "rows that are not some 16 bytes apart"
