"""HISA's kernel for Hopper gives candidates the scores that scoring all keys gives, bit for bit.

Without a GPU, TMA and tensor cores are emulated, with swizzle and mbarriers, so sizes are tiny.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, of whose kernels HISA has some beside these, is not installed")

from bench.lightning.awkward import make_operands
from csattn.lightning import FP8, Operands
from csattn.lightning.hisa import choice, score
from csattn.lightning.hisa.choice import BlockLists
from csattn.lightning.score import hopper
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

NVCC = shutil.which("nvcc")


@pytest.fixture
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device has not what this kernel is written in")
    emulator.stand_in(monkeypatch, hopper, choice, score, multiprocessors=2)


def listed_candidates(
    kv_lens: Tensor, block_size: int, num_blocks: int, longer_than: int
) -> tuple[Tensor, Tensor, BlockLists]:
    """Return three candidate blocks per query, the number of keys that it sees in them, and the blocks' lists."""
    scores = torch.randn(len(kv_lens), num_blocks)
    chosen = [torch.full(sizes, -7, dtype=torch.int32, device=DEVICE) for sizes in ((len(kv_lens), 3), (len(kv_lens),))]
    lists = BlockLists.empty(num_blocks, len(kv_lens), DEVICE)
    of_queries = scores.to(DEVICE), kv_lens.to(DEVICE)
    choice.choose_candidates(*of_queries, block_size, (1, 1), *chosen, lists=lists, longer_than=longer_than)
    return chosen[0], chosen[1], lists


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_heads", "dtype", "block_size"),
    [(37, 140, 64, FP8, 128), (35, 150, 32, FP8, 64), (3, 129, 16, torch.bfloat16, 128)],
)
def test_candidate_scores_have_the_bits_of_scoring_all_keys(
    num_queries: int, num_keys: int, num_heads: int, dtype: torch.dtype, block_size: int
) -> None:
    made = make_operands("random", num_queries, num_keys, num_heads, 128, key_scale=True)
    assert made.key_scale is not None
    scale, weights = made.key_scale.to(DEVICE), made.weights.to(DEVICE)
    operands = Operands(made.q.to(DEVICE, dtype), made.k.to(DEVICE, dtype), weights, scale)
    kv_lens = torch.randint(0, num_keys + 1, (num_queries,), dtype=torch.int32)
    kv_lens[-1] = num_keys
    left_out = block_size // 2
    num_blocks = -(-num_keys // block_size)
    candidates, num_seen, lists = listed_candidates(kv_lens, block_size, num_blocks, left_out)
    got = score.score_candidates(operands, block_size, 3, lists)
    tile_max_lens = torch.full((-(-num_queries // hopper.queries_of_tile(num_heads)),), num_keys, dtype=torch.int32)
    dense = torch.full((num_queries, -(-num_keys // 256) * 256), torch.nan, device=DEVICE)
    hopper.write_scores(operands, range(num_keys), tile_max_lens.to(DEVICE), dense)
    positions = candidates.clamp(min=0)[..., None] * block_size + torch.arange(block_size, device=DEVICE)
    want = dense.gather(1, positions.flatten(1).long())
    scored = (torch.arange(got.shape[1], device=DEVICE) < num_seen[:, None]) & (num_seen[:, None] > left_out)
    assert torch.equal(got[scored], want[scored])


@pytest.mark.usefixtures("kernels")
def test_block_scores_have_the_bits_of_scoring_all_block_keys() -> None:
    operands = make_operands("random", 6, 70, 64, 128, torch.float16, key_scale=True)
    kv_lens = torch.tensor([70 * 16, 5, 0, 1, 64 * 16, 0], dtype=torch.int32)
    assert operands.key_scale is not None
    arrays = [x.to(DEVICE) for x in (operands.q, operands.k, operands.weights, operands.key_scale)]
    operands = Operands(*arrays)
    got = score.score_blocks(operands, kv_lens.to(DEVICE), 16)
    want = torch.full((6, 128), torch.nan, device=DEVICE)
    tile_max_lens = torch.tensor([70, 64], dtype=torch.int32, device=DEVICE)
    hopper.write_scores(operands, range(70), tile_max_lens, want)
    assert torch.equal(got[:4, :70], want[:4, :70])
    assert torch.equal(got[4:, :64], want[4:, :64])


@pytest.mark.usefixtures("kernels")
def test_each_block_lists_every_query_that_chose_it_once() -> None:
    num_queries, num_blocks, parts_each = 70, 9, 3
    kv_lens = torch.randint(0, num_blocks * 16 + 1, (num_queries,), dtype=torch.int32)
    candidates, _, lists = listed_candidates(kv_lens, 16, num_blocks, 20)
    chosen, counts = candidates.cpu().where(kv_lens[:, None] > 20, -1).flatten(), lists.counts.tolist()
    for block, count in enumerate(counts[:-2]):
        assert lists.entries[block, :count].sort().values.tolist() == (chosen == block).nonzero()[:, 0].tolist()
    wanted = {n * parts_each + part for n, count in enumerate(counts[:-2]) for part in range(-(-count // 32))}
    assert sorted(lists.items[: counts[-2]].tolist()) == sorted(wanted)
    assert counts[-1] == 0


@pytest.mark.skipif(NVCC is None, reason="this machine has no CUDA compiler")
@pytest.mark.parametrize(("num_heads", "block_size"), [(64, 128), (16, 64)])
def test_the_candidate_kernel_compiles_without_register_spills(num_heads: int, block_size: int, tmp_path: Path) -> None:
    defines = score.defines_for(FP8, num_heads, 128, block_size)
    options = [f"-D{name}={value}" for name, value in defines.items()]
    target = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-o", tmp_path / "kernel"]
    command = [str(NVCC), *options, *target, score.SOURCE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said.partition("score_candidates")[2].split("Used")[0]
