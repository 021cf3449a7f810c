"""Host rows become readable for the device, or the reason is given; nothing stays locked."""

import gc
import mmap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import pinned
from offload.errors import PinningError
from offload.gather import RowGather, make_row_lists
from offload.host_memory import allocate_rows, copy_rows
from offload.pinned import PinnedRows
from tests.offload.soundness import check

PAGE = 4096


class FakeDriver:
    """A driver that records what is registered, and refuses some registrations."""

    def __init__(self, refuses_read_write: bool = False, refuses_read_only: bool = True, refuses_from: int = 10**9):
        self.registered: dict[int, int] = {}
        self.most = 0
        self._refuses = {False: refuses_read_write, True: refuses_read_only}
        self._refuses_from = refuses_from

    def register(self, address: int, num_bytes: int, read_only: bool = False) -> None:
        if self._refuses[read_only] or len(self.registered) >= self._refuses_from:
            raise PinningError("the driver said no")
        assert address % PAGE == 0 and num_bytes % PAGE == 0
        assert all(address + num_bytes <= at or at + size <= address for at, size in self.registered.items())
        self.registered[address] = num_bytes
        self.most = max(self.most, len(self.registered))

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pin(self, layers: list[Tensor], **options: object) -> PinnedRows:
        return PinnedRows(layers, register=self.register, unregister=self.unregister, **options)


def make_layers(num_layers: int = 3, context_len: int = 100) -> list[Tensor]:
    """Return layers that share no pages; each layer's last page is not full."""
    return copy_rows(torch.randn(num_layers, 2, context_len, 2, 16))


@pytest.mark.parametrize("chunk_pages", [1, 3, 1000])
def test_all_rows_are_registered_in_chunks_that_share_no_page(chunk_pages: int) -> None:
    driver, progress = FakeDriver(), []
    rows = driver.pin(
        make_layers(), chunk_bytes=chunk_pages * PAGE, progress=lambda done, total: progress.append((done, total))
    )
    check(rows)
    assert rows.pinned and rows.how == "in place"
    assert max(driver.registered.values()) <= chunk_pages * PAGE
    assert rows.addresses == [layer.data_ptr() for layer in rows.layers]
    assert progress[-1][0] == progress[-1][1] == sum(driver.registered.values())
    assert [done for done, _ in progress] == sorted({done for done, _ in progress})
    rows.close()
    rows.close()
    assert not driver.registered
    assert "closed" in repr(rows)
    with pytest.raises(PinningError, match=r"cannot read <PinnedRows 3 layers.*closed"):
        _ = rows.addresses


def test_each_layer_is_registered_separately_and_once() -> None:
    """A layer in two registrations could not be copied to the device in one call."""
    driver = FakeDriver()
    pages = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 7 * PAGE), np.float32))
    layers = [pages[: 2 * PAGE // 4], pages[2 * PAGE // 4 : 5 * PAGE // 4], pages[5 * PAGE // 4 :]]
    rows = driver.pin([layer.view(1, -1, 2, 16) for layer in (*layers, layers[1])])
    check(rows)
    assert rows.how == "in place"
    assert driver.registered == {layer.data_ptr(): layer.nbytes for layer in layers}


def test_rows_that_share_a_page_with_something_else_are_copied() -> None:
    driver = FakeDriver()
    whole = torch.randn(3, 2, 100, 2, 16)
    rows = driver.pin(list(whole))
    check(rows)
    assert rows.how.startswith("a copy") and torch.equal(torch.stack(rows.layers), whole)
    assert not any(begin <= whole.data_ptr() < begin + size for begin, size in driver.registered.items())


def test_a_layer_that_occurs_twice_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may share their rows. The copy needs no more memory than its pages."""
    driver, whole = FakeDriver(), torch.randn(2, 2, 100, 2, 16)  # which share a page
    monkeypatch.setattr(pinned, "host_memory_bytes", lambda: whole.nbytes)
    rows = driver.pin([*whole, whole[0]])
    check(rows)
    assert rows.how.startswith("a copy") and len(driver.registered) == 2
    assert torch.equal(torch.stack(rows.layers), whole[[0, 1, 0]])


def test_a_refused_registration_leaves_nothing_locked() -> None:
    driver = FakeDriver(refuses_from=2)
    layers = make_layers()
    rows = driver.pin(layers, chunk_bytes=PAGE)
    assert driver.most == 2 and not driver.registered
    assert not rows.pinned and rows.how.startswith("the driver said no")
    assert rows.layers[0].data_ptr() == layers[0].data_ptr()
    with pytest.raises(PinningError, match="not pinned: the driver said no"):
        _ = rows.addresses
    check(rows)
    rows.close()


def test_an_error_in_the_progress_callback_leaves_nothing_locked() -> None:
    driver = FakeDriver()

    def fail(done: int, total: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        driver.pin(make_layers(), progress=fail)
    assert driver.most == 1 and not driver.registered


def test_read_only_memory_is_registered_read_only() -> None:
    driver = FakeDriver(refuses_read_write=True, refuses_read_only=False)
    with_rows = driver.pin(make_layers())
    assert with_rows.how == "in place, read only" and with_rows.pinned
    with_rows.close()


def read_only_map(path: Path, values: Tensor) -> Tensor:
    values.numpy().tofile(path)
    mapped = np.asarray(np.memmap(path, np.float32, "r", shape=tuple(values.shape)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(mapped)


def test_a_map_that_the_driver_refuses_is_copied(tmp_path: Path) -> None:
    values = torch.randn(2, 300, 2, 16)
    mapped = read_only_map(tmp_path / "kv", values)
    driver = FakeDriver()
    own = driver.register
    driver.register = lambda address, num_bytes, read_only=False: (  # type: ignore[method-assign]
        own(address, num_bytes, read_only or address == mapped.data_ptr() // PAGE * PAGE)
    )
    rows = driver.pin([mapped])
    assert rows.how.startswith("a copy")
    assert torch.equal(rows.layers[0], values) and rows.addresses != [mapped.data_ptr()]
    rows.close()
    assert not driver.registered


def test_without_memory_for_a_copy_rows_stay_unpinned_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "host_memory_bytes", lambda: 1000)
    rows = FakeDriver(refuses_read_write=True).pin(make_layers())
    assert rows.how == "the driver said no; a copy needs 76,800 bytes and 1,000 are available"


def test_a_low_limit_of_locked_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "locked_limit_bytes", lambda: 65536)
    rows = FakeDriver(refuses_read_write=True).pin(make_layers())
    assert rows.how == "the driver said no; `ulimit -l` allows 65,536 bytes"


def test_rows_are_unregistered_when_their_owner_is_deleted() -> None:
    driver = FakeDriver()
    rows = driver.pin(make_layers())
    assert driver.registered
    del rows
    gc.collect()
    assert not driver.registered


def test_allocated_rows_are_page_aligned_and_zero() -> None:
    layers = allocate_rows(3, (2, 101, 2, 8), torch.bfloat16)
    assert all(layer.shape == (2, 101, 2, 8) and layer.data_ptr() % PAGE == 0 for layer in layers)
    assert all(not layer.any() for layer in layers)
    assert torch.equal(copy_rows(make_layers())[2], copy_rows(make_layers())[2]) is False  # random values


def test_copied_rows_are_equal_and_in_new_memory() -> None:
    layers = make_layers(2, 100_003)
    copies = copy_rows(layers)
    for layer, copy in zip(layers, copies, strict=True):
        assert torch.equal(layer, copy) and layer.data_ptr() != copy.data_ptr() and copy.dtype == layer.dtype


def gathers(rows: PinnedRows) -> bool:
    """Return whether the device reads the same bytes as the host."""
    layer = rows.layers[-1]
    num_rows, row_bytes = layer[0, :, 0, 0].numel(), layer[0, 0].nbytes
    lists = make_row_lists(1, num_rows, torch.device("cuda"))
    target = torch.zeros_like(layer[0], device="cuda")
    lists.counts.fill_(num_rows)
    lists.from_addresses.fill_(rows.addresses[-1])
    lists.to_addresses.fill_(target.data_ptr())
    lists.from_rows.copy_(torch.arange(num_rows))
    lists.to_rows.copy_(torch.arange(num_rows))
    RowGather(row_bytes, 1).launch(lists)
    # copied to separate pages: a copy to memory that shares a page with pinned rows is refused
    return torch.equal(allocate_rows(1, target.shape, target.dtype)[0].copy_(target), layer[0])


@pytest.mark.gpu
def test_the_device_reads_pinned_rows_and_read_only_maps(tmp_path: Path) -> None:
    rows = PinnedRows(make_layers(3, 5001), chunk_bytes=1 << 18)
    check(rows)
    assert rows.pinned and gathers(rows)
    rows.close()
    mapped = read_only_map(tmp_path / "kv", torch.randn(2, 5001, 2, 16))
    rows = PinnedRows([mapped])
    print(rows)
    assert rows.pinned and gathers(rows)
    torch.cuda.synchronize()
    rows.close()


@pytest.mark.gpu
def test_a_failed_registration_leaves_no_cuda_error() -> None:
    layers = make_layers()
    first = PinnedRows(layers)
    second = PinnedRows(layers)  # registering the same pages again is refused, so they are copied
    assert first.how == "in place" and second.how.startswith("a copy") and gathers(second)
    torch.zeros(3, device="cuda").add_(1)
    torch.cuda.synchronize()
    first.close()
    second.close()
