"""Selection from lists, given the maxima of groups of keys, is the definition's in ascending order, for any scores."""

import pytest
import torch
from torch import Tensor

from csattn.lightning import top_k_reference
from csattn.lightning.paged import hopper as paged_hopper
from csattn.lightning.topk import grouped
from csattn.lightning.topk.grouped import GroupMaxima, select_from_lists
from csattn.lightning.topk.reference import orderable
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.lightning.topk.test_device import KINDS, make_scores

K = 40
MAX_PAGES = 34
LENGTHS = [64 * MAX_PAGES, 64 * 31 + 5, 300, K + 1, K, 0]


@pytest.fixture
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, emulate thread blocks of 64 threads with room for 128 entries."""
    emulator.stand_in(monkeypatch, grouped)
    if DEVICE.type == "cpu":
        small = {"THREADS": 64, "SLOTS": 320, "ENTRIES": 128, "MAX_TILES": 64, "MAX_GROUPS": 512, "MANY_GROUPS": 30}
        for name, value in small.items():
            monkeypatch.setattr(grouped, name, value)


def group_maxima_by_definition(scores: Tensor, legal_len: Tensor, group_keys: int) -> GroupMaxima:
    rows, length = scores.shape
    legal = torch.arange(length) < legal_len[:, None]
    keys = torch.where(legal, (orderable(scores).long() + 2**31).clamp(min=1), 0).view(rows, -1, 64)
    of_page = min(group_keys, 16)
    best = keys.view(rows, -1, 64 // of_page, of_page).amax(3)
    group_pages = group_keys // of_page
    if group_pages > 1:
        missing = -best.shape[1] % group_pages
        best = torch.cat((best, best.new_zeros(rows, missing, 4)), dim=1)
        best = best.view(rows, -1, group_pages, 4).amax(2)
    best = torch.where(best >= 2**31, best - 2**32, best).to(torch.int32).flatten(1)
    return GroupMaxima(best, group_keys, torch.zeros(rows, grouped.SLOTS, dtype=torch.int64))


def choose(
    scores: Tensor,
    legal_len: Tensor,
    group_maxima: GroupMaxima,
    k: int,
    pages: Tensor | None = None,
    next_rows: tuple[Tensor, ...] = (),
) -> Tensor:
    group_maxima = GroupMaxima(group_maxima.keys.to(DEVICE), group_maxima.group_keys, group_maxima.slots.to(DEVICE))
    out = torch.full((len(scores), k), -7, dtype=torch.int32, device=DEVICE)
    arrays = [None if x is None else x.to(DEVICE) for x in (legal_len, pages)]
    select_from_lists(scores.to(DEVICE), group_maxima, arrays[0], arrays[1], out, next_rows)  # type: ignore[arg-type]
    return out.cpu()


def ascending(scores: Tensor, k: int, legal_len: Tensor) -> Tensor:
    want = top_k_reference(scores, k, legal_len)
    want = torch.where(want < 0, 2**31 - 1, want).sort(dim=1).values
    return torch.where(want == 2**31 - 1, -1, want)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("group_keys", [8, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_from_groups_of_adversarial_scores_equals_the_definition(kind: str, group_keys: int) -> None:
    scores, lens = make_scores(kind, len(LENGTHS), 64 * MAX_PAGES), torch.tensor(LENGTHS, dtype=torch.int32)
    poison = torch.where(torch.arange(scores.shape[1]) % 2 == 0, torch.nan, -torch.nan)
    poisoned = torch.where(torch.arange(scores.shape[1]) < lens[:, None], scores, poison)
    got = choose(poisoned, lens, group_maxima_by_definition(scores, lens, group_keys), K)
    assert torch.equal(got, ascending(scores, K, lens))


@pytest.mark.usefixtures("kernels")
def test_selection_from_groups_maps_positions_through_pages() -> None:
    scores, lens = torch.randn(2, 640), torch.tensor([611, 30], dtype=torch.int32)
    pages = torch.randperm(20).to(torch.int32).view(2, 10)
    group_maxima = group_maxima_by_definition(scores, lens, 16)
    at = ascending(scores, K, lens)
    want = pages.gather(1, at.clamp(min=0).long() // 64) * 64 + at % 64
    assert torch.equal(choose(scores, lens, group_maxima, K, pages), torch.where(at < 0, -1, want))


@pytest.mark.usefixtures("kernels")
def test_prefetching_ignores_pages_that_do_not_exist() -> None:
    scores, lens = torch.randn(1, 640), torch.tensor([640], dtype=torch.int32)
    pages = torch.tensor([[3, -1, 1, 2**24, 0, 4, 2, -7, 6, 5]], dtype=torch.int32)
    rows = torch.zeros(7 * 64, 48, device=DEVICE)
    next_rows = rows[:, :32], rows[:, 32:]
    group_maxima = group_maxima_by_definition(scores, lens, 16)
    want = choose(scores, lens, group_maxima, K, pages)
    assert torch.equal(choose(scores, lens, group_maxima, K, pages, next_rows), want)
    assert torch.equal(choose(scores, lens, group_maxima, K, pages, (rows[:, 1:],)), want), "rows that begin anywhere"


def test_the_number_of_groups_is_between_4096_and_8192() -> None:
    for max_pages in (512, 1023, 1024, 2047, 2048, 3000, 4096):
        group_maxima = GroupMaxima.make(torch.zeros(2, max_pages), 2048)
        assert group_maxima is not None
        assert 4096 <= group_maxima.keys.shape[1] <= 8192
        assert paged_hopper.PAGES * 16 % group_maxima.group_keys == 0, "a group is of one block"
    for rows, max_pages, k in ((1, 511, 2048), (1, 4097, 2048), (1, 2048, 2049), (3, 2048, 2048), (0, 2048, 2048)):
        assert GroupMaxima.make(torch.zeros(rows, max_pages), k) is None
