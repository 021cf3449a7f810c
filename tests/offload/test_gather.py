"""Listed rows arrive where they should; nothing else is read or written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from offload import gather as module
from offload.cuda import host_register, host_unregister
from offload.errors import OffloadError
from offload.gather import RowGather, RowLists, make_row_lists
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE, crossed


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on the CPU if there is no GPU."""
    emulator.stand_in(monkeypatch, module)


def test_row_sizes_that_are_not_a_multiple_of_16_bytes_are_refused() -> None:
    with pytest.raises(OffloadError, match=r"136 bytes cannot be gathered.*multiple of 16"):
        RowGather(136, max_lists=1)


def make_lists(counts: list[int], num_rows: int, sources: torch.Tensor, targets: torch.Tensor) -> RowLists:
    """Return lists that each copy random rows of one source to random rows of one target."""
    capacity = max(*counts, 1)
    lists = make_row_lists(len(counts), capacity, DEVICE)
    lists.counts.copy_(torch.tensor(counts))
    lists.from_addresses.copy_(torch.tensor([source.data_ptr() for source in sources]))
    lists.to_addresses.copy_(torch.tensor([target.data_ptr() for target in targets]))
    for list_idx in range(len(counts)):
        lists.from_rows[list_idx] = torch.randperm(num_rows, device=DEVICE)[:capacity]
        lists.to_rows[list_idx] = torch.randperm(num_rows, device=DEVICE)[:capacity]
    return lists


@contextmanager
def readable_for_device(rows: torch.Tensor) -> Iterator[None]:
    """Pin the rows if there is a GPU."""
    if DEVICE.type == "cpu":
        yield
        return
    host_register(rows.data_ptr(), rows.nbytes)
    try:
        yield
    finally:
        host_unregister(rows.data_ptr())


LISTS = [([0, 7, 0, 1009, 1, 0], 3), ([31, 32, 33] * 40, 16), ([0], 1), ([1], 1)]


@pytest.mark.parametrize(("row_bytes", "lists"), crossed([(16,), (128,), (320,), (4096,)], LISTS))
def test_only_listed_rows_are_copied(
    monkeypatch: pytest.MonkeyPatch, row_bytes: int, lists: tuple[list[int], int]
) -> None:
    counts, num_blocks = lists
    monkeypatch.setattr(module, "_NUM_BLOCKS", num_blocks)
    num_rows = 1024
    sources = torch.randn(len(counts), num_rows, row_bytes // 4)
    lists = make_lists(counts, num_rows, sources, sources)
    from_rows, to_rows = lists.from_rows.cpu().long(), lists.to_rows.cpu().long()
    targets = torch.full_like(sources, -1.0, device=DEVICE)
    lists.to_addresses.copy_(torch.tensor([target.data_ptr() for target in targets]))
    wanted = torch.full_like(sources, -1.0)
    poisoned = torch.full_like(sources, float("nan"))
    for i, count in enumerate(counts):
        wanted[i, to_rows[i, :count]] = sources[i, from_rows[i, :count]]
        poisoned[i, from_rows[i, :count]] = sources[i, from_rows[i, :count]]
    sources.copy_(poisoned)
    with readable_for_device(sources):
        RowGather(row_bytes, max_lists=len(counts)).launch(lists)
        assert torch.equal(targets.cpu(), wanted)


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_the_number_of_loads_in_flight_changes_nothing(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    for name, value in {"_NUM_BLOCKS": 2, "_THREADS": 256, "_IN_FLIGHT": in_flight}.items():
        monkeypatch.setattr(module, name, value)
    sources, targets = torch.randn(2, 500, 64, device=DEVICE), torch.zeros(2, 500, 64, device=DEVICE)
    lists = make_lists([499, 13], 500, sources, targets)
    RowGather(256, max_lists=2).launch(lists)
    for i, count in enumerate([499, 13]):
        copied = lists.to_rows[i, :count].long()
        assert torch.equal(targets[i, copied], sources[i, lists.from_rows[i, :count].long()])
    assert int((targets != 0).any(-1).sum()) == 499 + 13


def test_lists_may_have_room_for_more_than_2_to_the_32_pieces() -> None:
    row_bytes, capacity = 1 << 20, 1 << 16
    sources = torch.randn(1, 3, row_bytes // 4, device=DEVICE)
    targets = torch.zeros_like(sources)
    lists = make_row_lists(1, capacity, DEVICE)
    lists.counts.fill_(2)
    lists.from_addresses.fill_(sources.data_ptr())
    lists.to_addresses.fill_(targets.data_ptr())
    lists.from_rows[0, :2], lists.to_rows[0, :2] = torch.tensor([[2, 0], [1, 2]], device=DEVICE)
    RowGather(row_bytes, max_lists=1).launch(lists)
    assert torch.equal(targets[0, 1:], sources[0, [2, 0]]) and not targets[0, 0].any()
