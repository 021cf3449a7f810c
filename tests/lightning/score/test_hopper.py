"""The kernels for Hopper: scores agree with their definition, and choices equal those from all scores.

Without a GPU, TMA and tensor cores are emulated, with swizzle and mbarriers, so sizes are tiny.
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, which scores what does not suit these kernels, is not installed")

from bench.lightning.awkward import KINDS, make_operands
from csattn.lightning import FP8, Operands, score_all, score_keys, top_k_reference
from csattn.lightning.prefill import contenders
from csattn.lightning.prefill.contenders import Contenders, Sampling
from csattn.lightning.prefill.stream import choose_by_contenders, choose_scored
from csattn.lightning.score import hopper
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

NVCC = shutil.which("nvcc")


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device has not what these kernels are written in")
    monkeypatch.setattr(contenders, "THREADS", 64)
    emulator.stand_in(monkeypatch, contenders, hopper, multiprocessors=2)


def made_operands(kind: str, num_queries: int, num_keys: int, num_heads: int, dtype: torch.dtype) -> Operands:
    """Return operands on the device. With fewer than 64 heads, they have a scale per key."""
    made = make_operands(kind, num_queries, num_keys, num_heads, 128, key_scale=num_heads < 64)
    scale = None if made.key_scale is None else made.key_scale.to(DEVICE)
    return Operands(made.q.to(DEVICE, dtype), made.k.to(DEVICE, dtype), made.weights.to(DEVICE), scale)


def scored(operands: Operands, keys: range, lens: Tensor) -> Tensor:
    """Return scores [num_queries, len(keys) rounded up to whole tiles]: NaN where the kernel has not written."""
    tile_max_lens = hopper.tile_max_lens(lens.to(DEVICE), operands.q.shape[1])
    width = -(-len(keys) // 64) * 64
    out = torch.full((len(operands.q), width + 3), torch.nan, device=DEVICE)
    hopper.write_scores(operands, keys, tile_max_lens, out)
    assert out[:, width:].isnan().all()
    return out[:, :width]


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_heads", "dtype"),
    [(5, 150, 64, torch.float16), (13, 70, 32, torch.bfloat16), (17, 1, 16, torch.float16), (9, 200, 64, FP8)],
)
def test_hopper_scores_equal_their_definition(
    num_queries: int, num_keys: int, num_heads: int, dtype: torch.dtype
) -> None:
    operands = made_operands("random", num_queries, num_keys, num_heads, dtype)
    keys = range(num_keys // 3, num_keys)
    got = scored(operands, keys, torch.full((num_queries,), num_keys, dtype=torch.int32))[:, : len(keys)]
    want = score_keys(operands)[:, keys.start :]
    largest = float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=(1e-3 if DEVICE.type == "cuda" else 1e-6) * largest)


def test_products_of_minus_infinity_score_zero_and_nan_stays_nan() -> None:
    operands = made_operands("equal", 4, 64, 64, torch.float16)
    operands.k[:3, 0] = torch.tensor([-torch.inf, torch.inf, torch.nan])
    got = scored(operands, range(64), torch.full((4,), 64, dtype=torch.int32))
    assert got[0, :4].tolist()[:2] == [0.0, torch.inf]
    torch.testing.assert_close(got, score_keys(operands), rtol=0, atol=0, equal_nan=True)


def test_tiles_that_no_query_sees_are_not_scored() -> None:
    operands = made_operands("random", 9, 200, 64, torch.float16)
    lens = torch.tensor([0, 0, 0, 0, 64, 0, 0, 1, 65], dtype=torch.int32)
    missing = scored(operands, range(200), lens).isnan()
    tiles = missing.cpu().view(9, 4, 64)
    assert torch.equal(tiles.all(2), tiles.any(2))
    assert tiles.any(2).int().tolist() == [[1] * 4] * 4 + [[0, 1, 1, 1]] * 4 + [[0, 0, 1, 1]]


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 70), (3, 0), (0, 0)])
def test_scores_without_queries_or_keys_are_empty(num_queries: int, num_keys: int) -> None:
    made = made_operands("random", 3, 70, 32, torch.bfloat16)
    operands = replace(made.of_queries(slice(num_queries)), k=made.k[:num_keys], key_scale=None)
    lens = torch.full((num_queries,), num_keys, dtype=torch.int32)
    assert scored(operands, range(num_keys), lens).numel() == 0
    assert score_all(operands, lens).shape == (num_queries, num_keys)


def test_scores_of_every_second_key_have_the_bits_of_scoring_all() -> None:
    """Only whole blocks of 128 scores are written."""
    operands = made_operands("random", 4, 300, 32, torch.bfloat16)
    lens = torch.full((4,), 300, dtype=torch.int32)
    some = scored(operands, range(0, 300, 2), lens)
    assert torch.equal(some[:, :128], scored(operands, range(300), lens)[:, :256:2])
    assert some[:, 128:].isnan().all()


@pytest.mark.parametrize("kind", ["equal", "ascending", "few values", "nan and inf"])
def test_hopper_choices_from_contenders_equal_those_from_all_scores(kind: str) -> None:
    operands, k = made_operands(kind, 6, 330, 64, torch.float16), 10
    lens = torch.tensor([0, 39, 143, 330, 200, 7], dtype=torch.int32).to(DEVICE)
    made = Contenders(6, 330, Sampling(step=2, wanted=9, capacity=100), DEVICE)
    indices = torch.full((6, k), -7, dtype=torch.int32, device=DEVICE)
    overflowed = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    made.choose(operands, lens, hopper.tile_max_lens(lens, 64), indices, overflowed)
    marked = overflowed > 0
    assert torch.equal(indices[~marked], top_k_reference(score_keys(operands), k, lens)[~marked])
    assert not marked.any() or kind == "nan and inf"
    assert not marked[lens < 100].any(), "their lists hold all that they may see"


def test_operands_that_hopper_kernels_do_not_support_are_left_to_triton() -> None:
    for num_heads, dtype in ((63, torch.float16), (64, torch.float32)):
        assert not hopper.supports(make_operands("random", 1, 1, num_heads, 128, dtype))


@pytest.mark.skipif(NVCC is None, reason="this machine has no CUDA compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_the_hopper_kernels_compile_without_register_spills(dtype: torch.dtype, tmp_path: Path) -> None:
    options = [f"-D{name}={value}" for name, value in hopper.defines_for(dtype, 64, 128).items()]
    target = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-o", tmp_path / "kernel"]
    command = [str(NVCC), *options, *target, hopper.SOURCE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_heads", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_choices_on_the_gpu_equal_those_from_all_scores(
    kind: str, num_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "THREADS", 256)
    operands = made_operands(kind, 701, 9001, num_heads, dtype)
    lens = torch.randint(0, 9002, (701,), dtype=torch.int32)
    want = top_k_reference(score_all(operands, lens), 512, lens.to(DEVICE))
    for choose, workspace_bytes in (
        (choose_by_contenders, 1 << 20),
        (choose_by_contenders, 1 << 28),
        (choose_scored, 1 << 22),
    ):
        assert torch.equal(choose(operands, 512, lens, workspace_bytes), want)
