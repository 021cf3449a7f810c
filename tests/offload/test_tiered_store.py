"""A context in files within a host budget: the same rows as from memory, whoever reads and whatever fails."""

import errno
import os
import re
import threading
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.disk import BLOCK_BYTES, aligned_bytes
from offload.errors import DiskError, TierError
from offload.host_store import HostStore
from offload.row_files import FileSpan, RowFiles, plan_runs
from offload.tier import Tier
from offload.tiered_plan import plan_tiers
from offload.tiered_store import TieredStore

POISON = 0xFF  # bytes of the files around the rows: NaN as a float


class Files:
    """Layers of random KV in files, and the same in memory."""

    def __init__(self, directory, num_layers=2, heads=2, context_len=300, head_dim=8, dtype=torch.float32, offset=100):
        self.shape, self.dtype = (heads, context_len, head_dim), dtype
        self.kv = [torch.randn(heads, context_len, 2, head_dim).to(dtype) for _ in range(num_layers)]
        self.spans = []
        for layer_idx, kv in enumerate(self.kv):
            path = directory / f"layer-{layer_idx}"
            path.write_bytes(bytes([POISON]) * offset + kv.view(torch.uint8).numpy().tobytes() + bytes([POISON]) * 70)
            self.spans.append(FileSpan(path, offset, kv.nbytes))
        self.flat = HostStore(self.kv)

    def store(self, num_slots=10**9, page_rows=1, **options) -> TieredStore:
        """With room for so many pages."""
        options = {"stream_rows": 16, **options}
        heads, context_len, _ = self.shape
        slots = min(num_slots, len(self.kv) * heads * -(-context_len // page_rows))
        budgets = range(1, 1 << 24)
        sizes = len(self.kv), self.shape, self.dtype.itemsize
        how = options.get("resident", ()), page_rows, options["stream_rows"]
        budget = budgets[bisect_left(budgets, slots, key=lambda budget: slots_of(*sizes, budget, *how))]
        store = TieredStore(self.spans, self.shape, self.dtype, budget, page_rows=page_rows, **options)
        assert store.plan.num_slots == slots
        return store

    def indices(self, rng, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-1, self.shape[1] + 2, size=shape))


def slots_of(*arguments) -> int:
    """How many pages a budget has room for; 0 where it is refused."""
    try:
        return plan_tiers(*arguments).num_slots
    except TierError:
        return 0


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("page_rows", [1, 4, 7, 16, 500])
@pytest.mark.parametrize(("context_len", "num_slots"), [(1, 1), (15, 3), (16, 40), (300, 9), (300, 10**9)])
def test_gathered_rows_are_those_of_a_flat_store(tmp_path, rng, page_rows, context_len, num_slots) -> None:
    files = Files(tmp_path, context_len=context_len)
    with files.store(num_slots, page_rows) as store:
        for shape in [(2, 5), (2, 1), (2, 0), (3, 4, 30), (3, 2, 60), (2, 1), (1, 2, 40)]:
            for layer_idx in (0, 1):
                kv_indices = files.indices(rng, *shape)
                assert same(store.gather(layer_idx, kv_indices), files.flat.gather(layer_idx, kv_indices))
                store.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 64, 4096])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 3), (3, 64)])
def test_rows_of_any_width_anywhere_in_a_file(tmp_path, rng, dtype, offset, heads, head_dim) -> None:
    files = Files(tmp_path, 1, heads, 77, head_dim, dtype, offset)
    with files.store(50) as store:
        for _ in range(3):
            kv_indices = files.indices(rng, heads, 20)
            assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))


@pytest.mark.parametrize("page_rows", [1, 16])
@pytest.mark.parametrize(
    "rows", [slice(0, 0), slice(5, 5), slice(0, 1), slice(0, 300), slice(3, 297), slice(16, 32), slice(299, 300)]
)
def test_a_stream_gives_the_pieces_of_a_flat_store(tmp_path, page_rows, rows) -> None:
    files = Files(tmp_path)
    flat = HostStore(files.kv, stream_rows=16)
    with files.store(11, page_rows) as store:
        for _ in range(2):  # the second time some of it is in memory
            pieces = [piece.clone() for piece in store.stream(1, rows)]
            want = list(flat.stream(1, rows))
            assert len(pieces) == len(want)
            assert all(same(piece, other) for piece, other in zip(pieces, want, strict=True))
            store.check()


def test_a_flat_store_streams_all_rows_at_once_unless_told(tmp_path) -> None:
    files = Files(tmp_path)
    (piece,) = files.flat.stream(0, slice(3, 200))
    assert piece.data_ptr() == files.kv[0][:, 3:].data_ptr()
    assert piece.shape[1] == 197


def test_a_stream_evicts_nothing_and_finds_the_next_time_what_had_room(tmp_path) -> None:
    files = Files(tmp_path, context_len=160)
    with files.store(8, 16) as store:  # of 2 layers x 2 heads x 10 pages
        read = []
        for _ in range(3):
            before = store.tier.bytes_read
            for _ in store.stream(0, slice(0, 160)):
                pass
            read.append(store.tier.bytes_read - before)
        assert store.tier.num_used == 8
        assert read[0] > read[1] == read[2]
        assert store.tier.num_hits == 2 * 8


def test_a_stream_may_be_left_in_the_middle(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store() as store:
        for stop in (0, 1, 2):
            stream = store.stream(0, slice(0, 300))
            for _ in range(stop):
                next(stream)
            stream.close()
        assert sum(piece.shape[1] for piece in store.stream(0, slice(0, 300))) == 300


def test_rows_that_stay_are_read_once_and_others_are_a_sentence(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store(4, resident=[slice(0, 4), slice(260, 300)]) as store:
        for rows in (slice(0, 4), slice(260, 300)):
            assert same(store.rows(1, rows), files.kv[1][:, rows])
            before = store.tier.bytes_read
            assert store.rows(1, rows) is store.rows(1, rows)
            assert store.tier.bytes_read == before
        assert store.rows(0, slice(0, 0)).shape == (2, 0, 2, 8)
        with pytest.raises(TierError, match="rows 0 to 300 are not among those that stay"):
            store.rows(0, slice(0, 300))
        store.check()


@pytest.mark.parametrize(
    ("context_len", "stream_rows", "page_rows"),
    [(300, 16, 4), (5000, 2000, 1), (5000, 16, 2000), (300, 16, None), (5000, 64, None)],
)
def test_the_budget_that_a_refusal_names_is_enough(tmp_path, context_len, stream_rows, page_rows) -> None:
    files, how = Files(tmp_path, context_len=context_len), {"stream_rows": stream_rows, "page_rows": page_rows}
    with pytest.raises(TierError, match="a host budget of 1,000 bytes is too small") as refused:
        TieredStore(files.spans, files.shape, files.dtype, 1000, **how)
    least = int(re.search(r"need ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
    for more in (1, 10_000, 100_000):
        TieredStore(files.spans, files.shape, files.dtype, least + more, **how).close()
    with TieredStore(files.spans, files.shape, files.dtype, least, **how) as store:
        kv_indices = torch.arange(60).view(2, 30)
        assert same(store.gather(1, kv_indices), files.flat.gather(1, kv_indices))
        store.check()
        assert store.held_bytes <= least
    if page_rows is not None:  # another size may do with less
        with pytest.raises(TierError):
            TieredStore(files.spans, files.shape, files.dtype, least - 1, **how)


def test_pages_grow_where_numbering_every_row_would_take_the_budget(tmp_path) -> None:
    files = Files(tmp_path, context_len=2000, head_dim=1, dtype=torch.float16)  # rows of 4 bytes, like their numbers
    with TieredStore(files.spans, files.shape, files.dtype, 200_000) as store:
        assert store.plan.page_rows == 4
        kv_indices = torch.arange(0, 2000, 7).expand(2, -1)
        assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))


def test_what_was_gathered_or_prefetched_is_not_read_again(tmp_path, rng) -> None:
    files = Files(tmp_path)
    with files.store() as store:
        kv_indices = files.indices(rng, 2, 50)
        store.prefetch(0, kv_indices)
        store._ahead.submit(int).result()  # the thread has done what came before
        read = store.tier.bytes_read
        assert read > 0
        for _ in range(2):
            assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))
        assert store.tier.bytes_read == read


@pytest.mark.parametrize("page_rows", [1, 16])
def test_many_readers_with_prefetches_in_a_small_tier(tmp_path, page_rows) -> None:
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
        store.check()


def held_pages_stay(files: Files) -> bool:
    """Whether pages that a reader holds keep their bytes while another reader wants all the room there is."""
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
    """What the test above relies on: it must see the difference."""
    monkeypatch.setattr(Tier, "pin", lambda tier, slots: tier.use(slots))
    monkeypatch.setattr(Tier, "unpin", lambda tier, slots: None)
    assert not held_pages_stay(Files(tmp_path))


def test_who_wants_a_page_that_another_reads_waits_for_it(tmp_path, monkeypatch) -> None:
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
        store.check()


@pytest.mark.parametrize("through", ["gather", "stream", "prefetch"])
def test_a_disk_that_fails_is_a_sentence_and_spoils_nothing(tmp_path, monkeypatch, through) -> None:
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
        store.check()
        monkeypatch.setattr(os, "preadv", preadv)
        assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))
        assert sum(piece.shape[1] for piece in store.stream(0, slice(0, 300))) == 300
        store.check()


def test_who_waits_for_a_read_that_fails_reads_for_itself(tmp_path, monkeypatch) -> None:
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
        store.check()
        assert store.tier.num_used == 0  # what failed is forgotten


def test_reads_that_come_in_parts_are_whole(tmp_path, monkeypatch, rng) -> None:
    files, preadv = Files(tmp_path, context_len=2000), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:BLOCK_BYTES]], offset))
    with files.store(100) as store:
        kv_indices = files.indices(rng, 2, 70)
        assert same(store.gather(1, kv_indices), files.flat.gather(1, kv_indices))
        rows = torch.cat([piece.clone() for piece in store.stream(1, slice(0, 2000))], dim=1)
        assert same(rows, files.kv[1])


def test_a_file_that_is_shortened_is_a_sentence(tmp_path) -> None:
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


def test_the_store_says_what_it_holds(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store(8) as store:
        store.gather(0, torch.arange(4).view(2, 2))
        assert re.match(
            r"<TieredStore <HostTier 4/8 pages of 64 bytes> over <RowFiles 2 layers, 76,800 bytes, ", repr(store)
        )


@pytest.mark.parametrize("piece_bytes", [1, 100, 4095, 4096, 9000])
@pytest.mark.parametrize("spare_blocks", [0, 1, 40])
def test_pieces_are_the_bytes_of_the_file_also_at_its_end(tmp_path, rng, piece_bytes, spare_blocks) -> None:
    data = rng.integers(256, size=60_000, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    offset, num_bytes = 77, 50_000
    scratch = aligned_bytes(RowFiles.least_scratch_bytes(piece_bytes) + spare_blocks * BLOCK_BYTES)
    with RowFiles([FileSpan(tmp_path / "file", offset, num_bytes)]) as files:
        for starts in ([0, 49_999], [49_000, 49_500, 49_998], sorted(rng.integers(50_000, size=60).tolist()), []):
            out = np.full((len(starts), piece_bytes), POISON, np.uint8)
            places = rng.permutation(len(starts))
            assert files.read(0, np.array(starts, np.int64), out, places, scratch) >= len(starts[:1])
            for start, place in zip(starts, places, strict=True):
                there = min(piece_bytes, num_bytes - start)
                assert np.array_equal(out[place, :there], data[offset + start :][:there])


@given(
    st.lists(st.integers(0, 400_000), min_size=1, max_size=40, unique=True),
    st.integers(1, 9000),
    st.integers(1, 99_999),
)
def test_runs_cover_every_piece_once_and_fit(starts, piece_bytes, most_bytes) -> None:
    begins = np.sort(np.array(starts, np.int64))
    runs = plan_runs(begins, begins + piece_bytes, most_bytes)
    assert runs.pieces[0] == 0
    assert runs.pieces[-1] == len(begins)
    whole = np.concatenate([runs.begins, runs.ends])
    assert (whole % BLOCK_BYTES == 0).all()
    longest = max(most_bytes // BLOCK_BYTES, 1) * BLOCK_BYTES + -(-piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    assert (runs.ends - runs.begins <= longest).all()
    for run, (first, last) in enumerate(zip(runs.pieces, runs.pieces[1:], strict=False)):
        assert last > first
        assert runs.begins[run] <= begins[first] < runs.begins[run] + BLOCK_BYTES
        assert runs.needed[run] == begins[last - 1] + piece_bytes <= runs.ends[run]
    rounds = runs.rounds(int(longest))
    assert [first for first, _ in rounds] == [0, *(last for _, last in rounds[:-1])]
    assert rounds[-1][1] == len(runs.begins)
