"""Tiers: exact LRU, pages that are in use stay, bytes survive every move, and disks that fail lose nothing."""

import errno
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.disk import BLOCK_BYTES, DiskFile, aligned_bytes
from offload.errors import DiskError, OutOfPagesError, TierError
from offload.page_places import FilePlace, MemoryPlace
from offload.paged_rows import PagedRows
from offload.tier import NOWHERE, Tier
from offload.tiers import Tiers

PAGE_BYTES = 24


def pages(*numbers: int):
    return np.array(numbers, np.int64)


@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=5, unique=True), max_size=30), st.integers(1, 9))
def test_the_least_recently_used_page_goes(batches, num_slots) -> None:
    """Against a dictionary in the order of use. A batch larger than the tier is cut to it."""
    tier, want = Tier(20, num_slots), OrderedDict()
    for batch in batches:
        batch = batch[:num_slots]
        asked = pages(*batch)
        found = tier.look_up(asked)
        assert [page in want for page in batch] == (found >= 0).tolist()
        tier.pin(found[found >= 0])
        put = tier.put(asked[found < 0])
        assert (put >= 0).all()
        tier.unpin(found[found >= 0])
        for page in [page for page in batch if page in want]:
            want.move_to_end(page)
        for page in [page for page in batch if page not in want]:
            if len(want) == num_slots:
                want.pop(next(old for old in want if old not in batch))
            want[page] = None
        tier.check()
        assert {page for page in range(20) if tier.look_up(pages(page))[0] >= 0} == set(want)


@pytest.mark.parametrize("num_slots", [100, 333])
def test_the_oldest_are_found_among_many(rng, num_slots) -> None:
    """Lists of candidates are used up, skipped and made again; batches of few and of many pages."""
    tier, want = Tier(1000, num_slots), OrderedDict()
    for most in np.tile([1, 5, 90], 60):
        batch = np.unique(rng.zipf(1.2, int(rng.integers(most)) + 1) % 1000).astype(np.int64)
        found = tier.look_up(batch)
        tier.use(found[found >= 0])
        for page in batch[found >= 0].tolist():
            want.move_to_end(page)
        room = num_slots - len(want)
        for _ in range((found < 0).sum() - room):
            want.popitem(last=False)
        tier.put(batch[found < 0])
        want.update(dict.fromkeys(batch[found < 0].tolist()))
        assert set(np.flatnonzero(tier.look_up(np.arange(1000)) >= 0).tolist()) == set(want)
        tier.check()


def test_a_pinned_page_is_never_replaced() -> None:
    tier = Tier(10, 3)
    kept = tier.put(pages(0, 1))
    tier.pin(kept)
    assert tier.put(pages(2))[0] >= 0
    assert (tier.put(pages(3, 4)) >= 0).sum() == 1  # where 2 lay; nothing else may go
    assert np.array_equal(tier.look_up(pages(0, 1)), kept)
    tier.check()
    with pytest.raises(AssertionError, match="in use"):
        tier.drop(pages(0))
    tier.unpin(kept)
    with pytest.raises(AssertionError, match="not pinned"):
        tier.unpin(kept)


def test_a_put_that_may_not_evict_takes_free_slots_only() -> None:
    tier = Tier(10, 2)
    tier.put(pages(0))
    assert (tier.put(pages(1, 2, 3), evict=False) == NOWHERE).tolist() == [False, True, True]
    assert tier.look_up(pages(0))[0] >= 0
    tier.check()


@pytest.mark.parametrize(
    ("what", "where", "value"), [("_slot_of", 0, 1), ("_page_in", 0, 1), ("_pins", 1, 1), ("_free", 0, 0)]
)
def test_check_finds_what_is_wrong(what, where, value) -> None:
    tier = Tier(4, 3)
    assert tier.put(pages(2)) == [0]
    tier.check()
    getattr(tier, what)[where] = value
    with pytest.raises(AssertionError):
        tier.check()


def three_tiers(directory, slots=(2, 3, 6)) -> Tiers:
    return Tiers(
        [
            MemoryPlace(slots[0] * PAGE_BYTES, PAGE_BYTES),
            MemoryPlace(slots[1] * PAGE_BYTES, PAGE_BYTES),
            FilePlace(slots[2] * BLOCK_BYTES, PAGE_BYTES, directory),
        ]
    )


def fill(tiers: Tiers, num_pages: int) -> None:
    for page in range(num_pages):
        tiers.add(page)
        with tiers.hold(page, lowest=0) as held:
            held.fill_(page)


def test_pages_go_down_as_others_come_and_keep_their_bytes(tmp_path) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 10)
    assert [tiers.tier_of(page) for page in (9, 8)] == [0, 0]
    assert sum(tiers.tier_of(page) == 2 for page in range(10)) >= 5
    for page in (0, 5, 9, 0, 3):
        with tiers.hold(page) as held:
            assert held.unique().tolist() == [page]
            assert tiers.tier_of(page) <= 1
        tiers.check()
    tiers.close()


def test_pages_that_selections_name_stay_longer(tmp_path) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 2)
    tiers.use([0])
    tiers.add(2)
    assert [tiers.tier_of(page) for page in (0, 1, 2)] == [0, 1, 0]
    tiers.check()


def test_a_page_is_demoted_and_promoted_a_tier_at_a_time(tmp_path) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 1)
    assert [tiers.demote(0) and tiers.tier_of(0) for _ in range(3)] == [1, 2, False]
    assert [tiers.promote(0) and tiers.tier_of(0) for _ in range(3)] == [1, 0, False]
    with tiers.hold(0) as held:
        assert held.unique().tolist() == [0]


def test_a_held_page_stays_where_it_is_while_others_come(tmp_path) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 5)
    with tiers.hold(0, lowest=0) as held:
        for page in range(5, 10):
            tiers.add(page)
            with tiers.hold(page) as other:
                other.fill_(page)
            assert not tiers.demote(0)
        assert tiers.tier_of(0) == 0
        assert held.unique().tolist() == [0]
    assert tiers.demote(0)
    tiers.check()


def test_without_pins_a_held_page_would_be_replaced(tmp_path, monkeypatch) -> None:
    """What the test above relies on: it must see the difference."""
    monkeypatch.setattr(Tier, "pin", lambda tier, slots: None)
    monkeypatch.setattr(Tier, "unpin", lambda tier, slots: None)
    with pytest.raises(AssertionError):
        test_a_held_page_stays_where_it_is_while_others_come(tmp_path)


def test_memory_full_of_pages_in_use_is_a_sentence(tmp_path) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 6)
    for page in range(5):
        tiers.pin(page)
    with pytest.raises(OutOfPagesError, match="full of pages in use"), tiers.hold(5):
        pass
    tiers.unpin(4)
    with tiers.hold(5) as held:
        assert held.unique().tolist() == [5]
    tiers.check()


@pytest.mark.parametrize("slots", [(0, 3, 6), (1, 0, 6), (2, 3, 0)])
def test_a_tier_without_room_is_a_sentence(tmp_path, slots) -> None:
    with pytest.raises(TierError, match="give each tier a larger budget"):
        three_tiers(tmp_path, slots)
    with pytest.raises(TierError):
        Tiers([FilePlace(4 * BLOCK_BYTES, PAGE_BYTES, tmp_path)])


@pytest.mark.parametrize("failing", ["pwritev", "preadv"])
def test_a_disk_that_fails_leaves_every_page_where_it_was(tmp_path, monkeypatch, failing) -> None:
    tiers = three_tiers(tmp_path)
    fill(tiers, 10)
    places = [tiers.tier_of(page) for page in range(10)]
    work = getattr(os, failing)
    down, up = next(page for page in range(10) if places[page] == 1), places.index(2)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(DiskError, match=r"cannot (read|write) .*Input/output error; check its disk"):
        tiers.demote(down) if failing == "pwritev" else tiers.promote(up)
    tiers.check()
    monkeypatch.setattr(os, failing, work)
    for page in range(10):
        with tiers.hold(page) as held:
            assert held.unique().tolist() == [page]
    assert len(places) == 10


def test_a_page_that_comes_back_altered_is_an_error(tmp_path) -> None:
    place = FilePlace(2 * BLOCK_BYTES, PAGE_BYTES, tmp_path)
    place.write(1, torch.full((PAGE_BYTES,), 7, dtype=torch.uint8))
    assert place.read(1).unique().tolist() == [7]
    altered = aligned_bytes(BLOCK_BYTES)
    place._file.read(altered, BLOCK_BYTES)
    altered[5] ^= 1
    place._file.write(altered, BLOCK_BYTES)
    with pytest.raises(DiskError, match="its checksum differs"):
        place.read(1)


def test_a_full_disk_is_told_at_once(tmp_path, monkeypatch) -> None:
    def full(fd, offset, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(DiskError, match=r"cannot reserve 8,192 bytes in .*No space left"):
        FilePlace(2 * BLOCK_BYTES, PAGE_BYTES, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DiskError, match="name another directory"):
        FilePlace(2 * BLOCK_BYTES, PAGE_BYTES, tmp_path / "nowhere")


def test_a_file_place_leaves_neither_name_nor_descriptor(tmp_path) -> None:
    before = len(os.listdir("/dev/fd"))
    place = FilePlace(2 * BLOCK_BYTES, PAGE_BYTES, tmp_path)
    assert not list(tmp_path.iterdir())
    place.close()
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_reads_the_same_with_and_without_the_page_cache(tmp_path, monkeypatch, direct) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    data = np.random.default_rng(0).integers(256, size=2 * BLOCK_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    file, into = DiskFile.open(tmp_path / "file"), aligned_bytes(3 * BLOCK_BYTES)
    file.read(into, 0, at_least=len(data))
    assert np.array_equal(into[: len(data)], data)
    assert direct or not file.direct
    with pytest.raises(DiskError, match=r"ends at byte 8,292 and should go on to 12,288"):
        file.read(into, 0)
    file.close()
    with pytest.raises(DiskError, match="cannot open"):
        DiskFile.open(tmp_path / "none")


def test_rows_that_cannot_be_placed_end_their_sequence_and_no_other(tmp_path, monkeypatch) -> None:
    paged = PagedRows(4, [MemoryPlace(2 * 12, 12), FilePlace(3 * BLOCK_BYTES, 12, tmp_path)], page_size=3)
    kept, lost = paged.new_sequence(), paged.new_sequence()
    rows = torch.arange(24, dtype=torch.uint8).view(6, 4)
    paged.append(kept, rows)
    monkeypatch.setattr(os, "pwritev", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(DiskError, match="broken"):
        paged.append(lost, rows)
    paged.check()
    assert paged.table.sequences == [kept]
    assert torch.equal(paged.rows(kept), rows)


def test_forks_share_bytes_until_they_write(tmp_path) -> None:
    paged = PagedRows(4, [MemoryPlace(2 * 12, 12), FilePlace(6 * BLOCK_BYTES, 12, tmp_path)], page_size=3)
    first = paged.new_sequence()
    assert paged.rows(first).shape == (0, 4)
    paged.append(first, torch.full((5, 4), 1, dtype=torch.uint8))
    second = paged.fork(first)
    paged.append(second, torch.full((2, 4), 2, dtype=torch.uint8))
    paged.append(first, torch.full((1, 4), 3, dtype=torch.uint8))
    assert paged.rows(first)[:, 0].tolist() == [1, 1, 1, 1, 1, 3]
    assert paged.rows(second)[:, 0].tolist() == [1, 1, 1, 1, 1, 2, 2]
    paged.check()
    paged.free(first)
    assert paged.rows(second)[:, 0].tolist() == [1, 1, 1, 1, 1, 2, 2]
    paged.check()
    paged.close()
