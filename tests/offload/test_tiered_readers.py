"""Many readers of a context in files, and disks that fail: rows are right, or a clear error is raised."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch

from offload.disk import BLOCK_BYTES
from offload.errors import DiskError
from offload.row_files import FileSpan
from offload.tier import Tier
from offload.tiered_store import TieredStore
from tests.offload.soundness import check
from tests.offload.tiered_files import Files, same


@pytest.mark.parametrize("page_rows", [1, 16])
def test_concurrent_readers_and_prefetches_get_correct_rows_from_a_small_tier(tmp_path, page_rows) -> None:
    files = Files(tmp_path)
    with files.store(24, page_rows) as store, ThreadPoolExecutor(4) as readers:

        def read(seed: int) -> bool:
            rng = np.random.default_rng(seed)
            right = True
            for step in range(40):
                layer_idx, kv_indices = step % 2, files.indices(rng, 2, 12)
                store.prefetch(1 - layer_idx, files.indices(rng, 2, 12))
                right &= same(store.gather(layer_idx, kv_indices), files.flat.gather(layer_idx, kv_indices))
                if step % 10 == seed:
                    rows = torch.cat([piece.clone() for piece in store.stream(layer_idx, slice(5, 290))], dim=1)
                    right &= same(rows, files.kv[layer_idx][:, 5:290])
            return right

        assert list(readers.map(read, range(4))) == [True] * 4
        store._ahead.submit(int).result()
        check(store)


def held_pages_stay(files: Files) -> bool:
    """Return whether pages that a reader holds keep their bytes while another reader needs all slots."""
    with files.store(4) as store:
        pages = np.arange(4)
        with store.tier.hold(0, pages, pages * store.plan.row_bytes) as slots:
            before = store.tier.memory[slots].copy()
            kv_indices = torch.arange(100, 160).view(2, 30)
            assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))
            return np.array_equal(store.tier.memory[slots], before)


def test_a_page_that_a_reader_holds_is_never_replaced(tmp_path) -> None:
    assert held_pages_stay(Files(tmp_path))


def test_without_pins_a_page_that_a_reader_holds_would_be_replaced(tmp_path, monkeypatch) -> None:
    """This shows that the test above can fail."""
    monkeypatch.setattr(Tier, "pin", lambda tier, slots: tier.use(slots))
    monkeypatch.setattr(Tier, "unpin", lambda tier, slots: None)
    assert not held_pages_stay(Files(tmp_path))


def test_a_reader_waits_for_a_page_that_another_is_reading(tmp_path, monkeypatch) -> None:
    files, preadv = Files(tmp_path), os.preadv
    begun, go = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert go.wait(20)
        return preadv(*args)

    kv_indices = torch.arange(40).view(2, 20)
    with files.store() as alone:
        alone.gather(0, kv_indices)
    with files.store() as store, ThreadPoolExecutor(2) as readers:
        monkeypatch.setattr(os, "preadv", slow)
        first = readers.submit(store.gather, 0, kv_indices)
        assert begun.wait(20)
        second = readers.submit(store.gather, 0, kv_indices)
        go.set()
        for future in (first, second):
            assert same(future.result(20), files.flat.gather(0, kv_indices))
        assert store.tier.bytes_read == alone.tier.bytes_read
        check(store)


@pytest.mark.parametrize("through", ["gather", "stream", "prefetch"])
def test_a_disk_error_is_reported_and_leaves_the_store_usable(tmp_path, monkeypatch, through) -> None:
    files, preadv = Files(tmp_path), os.preadv

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kv_indices = torch.arange(40).view(2, 20)
    with files.store() as store:
        monkeypatch.setattr(os, "preadv", fail)
        if through == "prefetch":
            store.prefetch(0, kv_indices)
            store._ahead.submit(int).result()
        else:
            with pytest.raises(DiskError, match=r"cannot read .*layer-0 at 0: Input/output error; check its disk"):
                store.gather(0, kv_indices) if through == "gather" else list(store.stream(0, slice(0, 300)))
        check(store)
        monkeypatch.setattr(os, "preadv", preadv)
        assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))
        assert sum(piece.shape[1] for piece in store.stream(0, slice(0, 300))) == 300
        check(store)


def test_a_reader_retries_a_page_that_another_failed_to_read(tmp_path, monkeypatch) -> None:
    files, preadv = Files(tmp_path), os.preadv
    begun, go = threading.Event(), threading.Event()

    def fail(*args):
        if go.is_set():
            return preadv(*args)
        begun.set()
        assert go.wait(20)
        raise OSError(errno.EIO, "broken")

    kv_indices = torch.arange(40).view(2, 20)
    with files.store() as store, ThreadPoolExecutor(2) as readers:
        waiting = threading.Event()
        wait_for = store.tier._changed.wait_for
        monkeypatch.setattr(os, "preadv", fail)
        first = readers.submit(store.gather, 0, kv_indices)
        assert begun.wait(20)
        monkeypatch.setattr(store.tier._changed, "wait_for", lambda until: (waiting.set(), wait_for(until)))
        second = readers.submit(store.gather, 0, kv_indices)
        assert waiting.wait(20)
        go.set()
        with pytest.raises(DiskError, match="broken"):
            first.result(20)
        assert same(second.result(20), files.flat.gather(0, kv_indices))
        check(store)
        assert store.tier.num_used == 0  # pages that were not read take no slots


@pytest.mark.parametrize("num_there", [2, 8])
def test_a_store_without_enough_threads_is_refused_and_leaks_nothing(tmp_path, monkeypatch, num_there) -> None:
    """If the system refuses to start more threads, no store, thread or open file is left."""
    files, start, num_started = Files(tmp_path), threading.Thread.start, count()
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))

    def start_some(thread: threading.Thread) -> None:
        if next(num_started) >= num_there:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        with pytest.raises(DiskError, match=r"cannot start more threads.*can't start new thread.*raise the limit"):
            files.store()
    assert (threading.active_count(), len(os.listdir("/dev/fd"))) == (threads, descriptors)
    with files.store() as store:
        check(store)


def test_partial_reads_are_completed(tmp_path, monkeypatch, rng) -> None:
    files, preadv = Files(tmp_path, context_len=2000), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:BLOCK_BYTES]], offset))
    with files.store(100) as store:
        kv_indices = files.indices(rng, 2, 70)
        assert same(store.gather(1, kv_indices), files.flat.gather(1, kv_indices))
        rows = torch.cat([piece.clone() for piece in store.stream(1, slice(0, 2000))], dim=1)
        assert same(rows, files.kv[1])


def test_a_truncated_file_is_refused_with_the_reason(tmp_path) -> None:
    files = Files(tmp_path, context_len=2000)
    with files.store(10) as store:
        os.truncate(files.spans[1].path, 9000)
        with pytest.raises(DiskError, match=r"layer-1 ends at byte .* it was shortened while it was in use"):
            list(store.stream(1, slice(0, 2000)))
    with pytest.raises(DiskError, match="layer-1 has 9,000 bytes and its rows need"):
        files.store(10)


def test_closing_leaves_no_thread_and_no_descriptor(tmp_path, rng) -> None:
    files = Files(tmp_path)
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    with files.store(8) as store:
        store.gather(0, files.indices(rng, 2, 50))
        store.prefetch(1, files.indices(rng, 2, 50))
        next(store.stream(0, slice(0, 300)))
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/dev/fd")) <= descriptors
    broken = [files.spans[0], FileSpan(tmp_path / "none", 0, 1)]
    with pytest.raises(DiskError, match="cannot open"):
        TieredStore(broken, files.shape, files.dtype, 1 << 20)
    assert len(os.listdir("/dev/fd")) <= descriptors
