"""A context in files, within a budget of host memory, has the same rows as in memory."""

import errno
import os
import re
from contextlib import closing

import pytest
import torch

from offload import host_tier, tiered_store
from offload.disk import aligned_bytes
from offload.errors import TierError
from offload.host_store import HostStore
from offload.host_tier import HostTier
from offload.tier import Tier
from offload.tiered_store import TieredStore
from tests.offload.soundness import check
from tests.offload.tiered_files import Files, same


@pytest.mark.parametrize("page_rows", [1, 4, 7, 16, 500])
@pytest.mark.parametrize(("context_len", "num_slots"), [(1, 1), (15, 3), (16, 40), (300, 9), (300, 10**9)])
def test_gathered_rows_equal_those_of_a_flat_store(tmp_path, rng, page_rows, context_len, num_slots) -> None:
    files = Files(tmp_path, context_len=context_len)
    with files.store(num_slots, page_rows) as store:
        for shape in [(2, 5), (2, 1), (2, 0), (3, 4, 30), (3, 2, 60), (2, 1), (1, 2, 40)]:
            for layer_idx in (0, 1):
                kv_indices = files.indices(rng, *shape)
                assert same(store.gather(layer_idx, kv_indices), files.flat.gather(layer_idx, kv_indices))
                check(store)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 64, 4096])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 3), (3, 64)])
def test_rows_of_any_width_and_file_offset_are_gathered(tmp_path, rng, dtype, offset, heads, head_dim) -> None:
    files = Files(tmp_path, 1, heads, 77, head_dim, dtype, offset)
    with files.store(50) as store:
        for _ in range(3):
            kv_indices = files.indices(rng, heads, 20)
            assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))


@pytest.mark.parametrize("page_rows", [1, 16])
@pytest.mark.parametrize(
    "rows", [slice(0, 0), slice(5, 5), slice(0, 1), slice(0, 300), slice(3, 297), slice(16, 32), slice(299, 300)]
)
def test_a_stream_yields_the_pieces_of_a_flat_store(tmp_path, page_rows, rows) -> None:
    files = Files(tmp_path)
    flat = HostStore(files.kv, stream_rows=16)
    with files.store(11, page_rows) as store:
        for _ in range(2):  # the second time, some pages are in memory
            pieces = [piece.clone() for piece in store.stream(1, rows)]
            want = list(flat.stream(1, rows))
            assert len(pieces) == len(want)
            assert all(same(piece, other) for piece, other in zip(pieces, want, strict=True))
            check(store)


def test_a_flat_store_streams_all_rows_at_once_by_default(tmp_path) -> None:
    files = Files(tmp_path)
    (piece,) = files.flat.stream(0, slice(3, 200))
    assert piece.data_ptr() == files.kv[0][:, 3:].data_ptr()
    assert piece.shape[1] == 197


@pytest.mark.parametrize("place", [host_tier, tiered_store], ids=["of pages", "of streams"])
def test_a_budget_without_memory_for_it_is_refused_and_leaves_no_file_open(tmp_path, monkeypatch, place) -> None:
    def refuse(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    files, before = Files(tmp_path), os.listdir("/dev/fd")
    monkeypatch.setattr(place, "aligned_bytes", refuse)
    with pytest.raises(TierError, match=r"no memory for a host budget of [\d,]+ bytes .*; give a smaller one"):
        files.store()
    assert os.listdir("/dev/fd") == before


def test_a_stream_evicts_nothing_and_fills_free_slots(tmp_path) -> None:
    files = Files(tmp_path, context_len=160)
    with files.store(8, 16) as store:  # 8 of 2 layers x 2 heads x 10 pages
        read = []
        for _ in range(3):
            before = store.tier.bytes_read
            for _ in store.stream(0, slice(0, 160)):
                pass
            read.append(store.tier.bytes_read - before)
        assert store.tier.num_used == 8
        assert read[0] > read[1] == read[2]
        assert store.tier.num_hits == 2 * 8


def test_a_stream_can_be_closed_before_its_end(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store() as store:
        for stop in (0, 1, 2):
            stream = store.stream(0, slice(0, 300))
            for _ in range(stop):
                next(stream)
            stream.close()
        assert sum(piece.shape[1] for piece in store.stream(0, slice(0, 300))) == 300


def test_resident_rows_are_read_once_and_other_rows_are_refused(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store(4, resident=[slice(0, 4), slice(260, 300)]) as store:
        for rows in (slice(0, 4), slice(260, 300)):
            assert same(store.rows(1, rows), files.kv[1][:, rows])
            before = store.tier.bytes_read
            assert store.rows(1, rows) is store.rows(1, rows)
            assert store.tier.bytes_read == before
        assert store.rows(0, slice(0, 0)).shape == (2, 0, 2, 8)
        with pytest.raises(TierError, match="rows 0 to 300 do not stay in host memory"):
            store.rows(0, slice(0, 300))
        check(store)


@pytest.mark.parametrize(
    ("context_len", "stream_rows", "page_rows"),
    [(300, 16, 4), (5000, 2000, 1), (5000, 16, 2000), (300, 16, None), (5000, 64, None)],
)
def test_the_budget_named_in_a_refusal_is_enough(tmp_path, context_len, stream_rows, page_rows) -> None:
    files, how = Files(tmp_path, context_len=context_len), {"stream_rows": stream_rows, "page_rows": page_rows}
    with pytest.raises(TierError, match="a host budget of 1,000 bytes is too small") as refused:
        TieredStore(files.spans, files.shape, files.dtype, 1000, **how)
    least = int(re.search(r"need ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))
    for more in (1, 10_000, 100_000):
        TieredStore(files.spans, files.shape, files.dtype, least + more, **how).close()
    with closing(TieredStore(files.spans, files.shape, files.dtype, least, **how)) as store:
        kv_indices = torch.arange(60).view(2, 30)
        assert same(store.gather(1, kv_indices), files.flat.gather(1, kv_indices))
        check(store)
        assert store.held_bytes <= least
    if page_rows is not None:  # another page size may need less
        with pytest.raises(TierError):
            TieredStore(files.spans, files.shape, files.dtype, least - 1, **how)


def test_allocations_stay_within_the_budget(tmp_path, monkeypatch) -> None:
    taken: list[int] = []

    def take(num_bytes: int):
        taken.append(num_bytes)
        return aligned_bytes(num_bytes)

    for place in (host_tier, tiered_store):
        monkeypatch.setattr(place, "aligned_bytes", take)
    stay = [slice(0, 4), slice(260, 300)]
    with Files(tmp_path).store(3, page_rows=64, resident=stay) as store:  # a page is a block: no piece is copied twice
        taken += [store.rows(layer_idx, rows).nbytes for layer_idx in (0, 1) for rows in stay]
        books = store.plan.num_pages * Tier.BYTES_PER_PAGE + 3 * HostTier.slot_bytes(0)
        store.gather(0, torch.arange(0, 300, 30).expand(2, -1))
        assert store.held_bytes == sum(taken) + books <= store.budget_bytes


def test_pages_grow_if_a_table_of_single_rows_would_take_the_budget(tmp_path) -> None:
    files = Files(tmp_path, context_len=2000, head_dim=1, dtype=torch.float16)  # rows of 4 bytes, like their numbers
    with closing(TieredStore(files.spans, files.shape, files.dtype, 200_000)) as store:
        assert store.plan.page_rows == 4
        kv_indices = torch.arange(0, 2000, 7).expand(2, -1)
        assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))


def test_gathered_and_prefetched_rows_are_not_read_again(tmp_path, rng) -> None:
    files = Files(tmp_path)
    with files.store() as store:
        kv_indices = files.indices(rng, 2, 50)
        store.prefetch(0, kv_indices)
        store._ahead.submit(int).result()  # wait for the prefetching thread
        read = store.tier.bytes_read
        assert read > 0
        for _ in range(2):
            assert same(store.gather(0, kv_indices), files.flat.gather(0, kv_indices))
        assert store.tier.bytes_read == read


def test_the_repr_of_a_store_shows_its_contents(tmp_path) -> None:
    files = Files(tmp_path)
    with files.store(8) as store:
        store.gather(0, torch.arange(4).view(2, 2))
        assert re.match(
            r"<TieredStore <HostTier 4/8 pages of 64 bytes> over <RowFiles 2 layers, 76,800 bytes, ", repr(store)
        )


@pytest.mark.parametrize("layer_idx", [-1, 2])
def test_a_layer_index_out_of_range_is_refused(tmp_path, rng, layer_idx) -> None:
    """Pages are numbered over all layers, so another layer's pages would be returned."""
    files = Files(tmp_path)
    with files.store(resident=[slice(0, 4)]) as store:
        for ask in (
            lambda: store.gather(layer_idx, files.indices(rng, 2, 5)),
            lambda: store.prefetch(layer_idx, files.indices(rng, 2, 5)),
            lambda: list(store.stream(layer_idx, slice(0, 9))),
            lambda: store.rows(layer_idx, slice(0, 4)),
        ):
            with pytest.raises(TierError, match=f"the store has layers 0 to 1, not {layer_idx}"):
                ask()


@pytest.mark.parametrize("name", ["page_rows", "stream_rows"])
def test_page_rows_or_stream_rows_of_zero_are_refused(tmp_path, name) -> None:
    files = Files(tmp_path)
    with pytest.raises(TierError, match=f"{name} is 0; give at least 1"):
        TieredStore(files.spans, files.shape, files.dtype, 10**9, **{name: 0})
