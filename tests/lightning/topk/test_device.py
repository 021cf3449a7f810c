"""The Top-K kernels are exact for any scores, and read no score that is not legal.

Without a device they run on the CPU, compiled by a C++ compiler: see `tests/cuda_on_cpu`. Thread blocks are small
there, so that short rows are split among blocks, compacted and reread as often as long ones are.
"""

import pytest
import torch
from torch import Tensor

from csattn.cuda import limits
from csattn.lightning import top_k, top_k_reference
from csattn.lightning.topk import device
from csattn.lightning.topk.device import FEW_ROWS, MANY_ROWS, SHORT_ROWS, BlockShape, DigitShape, select_on_device
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

K = 40
LENGTH = 2001
MULTIPROCESSORS = 16
FEW, MANY = 2, 9  # rows: radix select in clusters of four; tile after tile in clusters of two


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, device, multiprocessors=MULTIPROCESSORS)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate blocks of 512 or 1024 scores in registers, or of tiles of 256 with room for one and a hundred entries."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(device, "FEW_ROWS", DigitShape(64, 4, per_sm=1))
        monkeypatch.setattr(device, "SHORT_ROWS", DigitShape(32, 4, per_sm=2))
        monkeypatch.setattr(device, "MANY_ROWS", BlockShape(32, 2, 384, per_sm=2))


def run(
    scores: Tensor,
    k: int,
    legal_len: Tensor | None,
    by_position: bool = False,
    pages: Tensor | None = None,
    page_size: int = 1,
) -> Tensor:
    out = torch.full((len(scores), k), -7, dtype=torch.int32, device=DEVICE)
    arrays = [None if array is None else array.to(DEVICE) for array in (legal_len, pages)]
    select_on_device(scores.to(DEVICE), arrays[0], by_position, arrays[1], page_size, out)
    return out.cpu()


def agree(scores: Tensor, k: int, legal_len: list[int]) -> None:
    """Require the definition's choice in both orders. Past the legal scores there are NaN of either sign."""
    legal = torch.tensor(legal_len, dtype=torch.int32)
    poison = torch.where(torch.arange(scores.shape[1]) % 2 == 0, torch.nan, -torch.nan)
    poisoned = torch.where(torch.arange(scores.shape[1]) < legal[:, None], scores, poison)
    want = top_k_reference(scores, k, legal)
    assert torch.equal(run(poisoned, k, legal), want)
    ascending = torch.where(want < 0, 2**31 - 1, want).sort(dim=1).values
    assert torch.equal(run(poisoned, k, legal, by_position=True), torch.where(want < 0, -1, ascending)[:, :k])


def make_scores(kind: str, rows: int, length: int) -> Tensor:
    """Return scores [rows, length] of that kind."""
    up = torch.arange(length, dtype=torch.float32).expand(rows, length)
    random = torch.randn(rows, length)
    bits = torch.randint(0, 2**32, (rows, length), dtype=torch.int64).to(torch.int32)
    kinds = {
        "random": random,
        "ascending": up,
        "descending": -up,
        "all equal": torch.full((rows, length), 3.25),
        "all zero, of either sign": torch.where(up % 3 == 0, -0.0, 0.0),
        "one bin": (0x4280_0000 + (bits & 7)).to(torch.int32).view(torch.float32),
        "neighbours": (0x4280_0000 + torch.arange(length)).to(torch.int32).view(torch.float32).expand(rows, -1),
        "two values": torch.where(random > 0.5, 1.0, -1.0),
        "few winners": torch.where(up % 997 == 5, 7.0, -7.0),
        "denormals": (bits & 0x8000_FFFF).view(torch.float32),
        "any bits": bits.view(torch.float32),  # includes infinities and NaN
        "infinities": torch.where(random > 1, torch.inf, torch.where(random < 0, -torch.inf, random)),
        "mostly NaN": torch.where(random > 1.9, random, torch.nan),
        "sawtooth": up % 300,
    }
    return kinds[kind].contiguous()


KINDS = [
    "random", "ascending", "descending", "all equal", "all zero, of either sign", "one bin", "neighbours", "two values",
    "few winners", "denormals", "any bits", "infinities", "mostly NaN", "sawtooth",
]  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_adversarial_scores_equals_the_definition(kind: str, rows: int) -> None:
    agree(make_scores(kind, rows, LENGTH), K, [LENGTH, 1100, 257, *range(K + 6, K, -1)][:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 64, 140])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_long_rows_equals_the_definition_every_time(kind: str, rows: int) -> None:
    scores = make_scores(kind, rows, 131075).to(DEVICE)
    legal = torch.tensor([131075 - 9973 * (row % 14) for row in range(rows)], dtype=torch.int32, device=DEVICE)
    want = top_k_reference(scores, 2048, legal)
    ascending = torch.where(want < 0, 2**31 - 1, want).sort(dim=1).values
    ascending = torch.where(want < 0, -1, ascending)  # both are padded at the end
    for _ in range(5):
        assert torch.equal(top_k(scores, 2048, legal), want)
        assert torch.equal(top_k(scores, 2048, legal, order="position"), ascending)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", [1, 5, 8, 17])  # 1, 5, 8 rows: clusters of eight, two and one; 17: of one
def test_top_k_equals_the_definition_for_every_cluster_size(rows: int) -> None:
    scores = make_scores("sawtooth", rows, LENGTH) + torch.randint(0, 3, (rows, LENGTH))
    agree(scores, K, [max(0, LENGTH - 130 * row) for row in range(rows)])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["random", "ascending", "all equal", "any bits"])
def test_top_k_of_rows_that_exceed_registers_equals_the_definition(kind: str) -> None:
    agree(make_scores(kind, 8, 6001), K, [6001, 6000, 2049, 2050, 1300, K, K + 1, 0])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("k", [1, 63, 127])
@pytest.mark.parametrize("length", [1, 64, 255, 257])
@pytest.mark.parametrize("rows", [5, 20])
def test_top_k_of_short_rows_equals_the_definition(rows: int, length: int, k: int) -> None:
    agree(make_scores("random", rows, length), k, [0, 1, length // 2, length - 1, length] * (rows // 5))


def test_top_k_with_the_devices_tile_sizes_equals_the_definition() -> None:
    """Run the device's real sizes once."""
    for rows, length in ((1, 33000), (9, 17000)):
        scores = make_scores("random", rows, length)
        want = top_k_reference(scores, 2048, torch.full((rows,), length)).sort(dim=1).values
        assert torch.equal(run(scores, 2048, None, by_position=True), want)
    scores = make_scores("neighbours", 1, 9000)
    assert torch.equal(run(scores, 2048, None), top_k_reference(scores, 2048, torch.tensor([9000])))


@pytest.mark.usefixtures("small_blocks")
def test_top_k_of_more_scores_than_a_block_can_mark_equals_the_definition() -> None:
    length = 2 * 2048 * 32 + 700
    scores = torch.randn(1, length).repeat(17, 1)
    agree(scores, K, [length, length - 1, *range(15)])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("width", [1000, 1001])
def test_top_k_takes_strided_rows_at_any_offset(first: int, width: int) -> None:
    wide = torch.randn(3, width)
    scores = wide[:, first : first + 700]
    got = run(scores, K, None)
    assert torch.equal(got, top_k_reference(scores.contiguous(), K, torch.tensor([700] * 3)))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("by_position", [False, True])
def test_top_k_maps_positions_through_pages(by_position: bool) -> None:
    scores = torch.randn(3, 640)
    legal = torch.tensor([640, 611, 30], dtype=torch.int32)
    pages = torch.randperm(60).to(torch.int32).view(3, 20)[:, :10]
    plain = run(scores, K, legal, by_position)
    paged = run(scores, K, legal, by_position, pages, page_size=64)
    at = plain.clamp(min=0).long()
    want = pages.gather(1, at // 64) * 64 + (at % 64).int()
    assert torch.equal(paged, torch.where(plain < 0, -1, want))


def test_cluster_sizes_fill_the_device_without_exceeding_it() -> None:
    chosen = [device._choose_blocks(rows, 131072, 132) for rows in (1, 12, 13, 29, 30, 66, 67, 132, 133, 2048)]
    assert [cluster for _, cluster in chosen] == [8, 8, 4, 4, 2, 2, 2, 2, 1, 1]
    assert [shape == FEW_ROWS for shape, _ in chosen] == [True] * 6 + [False] * 4
    lengths = [device._choose_blocks(1, length, 132) for length in (8192, 8193, 16384, 32768, 65536)]
    assert lengths == [(SHORT_ROWS, 1), (FEW_ROWS, 1), (FEW_ROWS, 2), (FEW_ROWS, 4), (FEW_ROWS, 8)]
    assert [device._choose_blocks(1024, n, 132)[0] for n in (8192, 8193)] == [SHORT_ROWS, FEW_ROWS]
    assert MANY_ROWS.capacity - MANY_ROWS.tile_len > device.MAX_K
    assert MANY_ROWS.per_sm * (MANY_ROWS.shared_bytes + 1024) <= 228 << 10, "blocks share a multiprocessor's memory"


def test_blocks_of_small_gpus_fit_their_shared_memory(as_ampere: None) -> None:
    shapes = [device._choose_blocks(rows, 131072, 170)[0] for rows in (1, 200, 2048)]
    assert all(shape.shared_bytes <= limits().block_bytes for shape in shapes if isinstance(shape, device.BlockShape))
    assert shapes[1] == device.MANY_ROWS_OF_SMALL and shapes[1].capacity - shapes[1].tile_len > device.MAX_K
