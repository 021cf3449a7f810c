"""A tier is an exact LRU cache that keeps pages in use; the files below it."""

import errno
import fcntl
import os
import resource
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.disk import BLOCK_BYTES, DiskFile, aligned_bytes
from offload.errors import DiskError
from offload.tier import NOWHERE, Tier
from tests.offload.soundness import check

O_DIRECT = getattr(os, "O_DIRECT", 0)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)


def pages(*numbers: int):
    return np.array(numbers, np.int64)


@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=5, unique=True), max_size=30), st.integers(1, 9))
def test_the_least_recently_used_page_is_evicted(batches, num_slots) -> None:
    """The definition is a dictionary in the order of use. A batch larger than the tier is cut to the tier's size."""
    tier, want = Tier(20, num_slots), OrderedDict()
    for batch in batches:
        batch = batch[:num_slots]
        asked = pages(*batch)
        found = tier.look_up(asked)
        assert [page in want for page in batch] == (found >= 0).tolist()
        tier.pin(found[found >= 0])
        put = tier.assign(asked[found < 0])
        assert (put >= 0).all()
        tier.unpin(found[found >= 0])
        for page in [page for page in batch if page in want]:
            want.move_to_end(page)
        for page in [page for page in batch if page not in want]:
            if len(want) == num_slots:
                want.pop(next(old for old in want if old not in batch))
            want[page] = None
        check(tier)
        assert {page for page in range(20) if tier.look_up(pages(page))[0] >= 0} == set(want)


@pytest.mark.parametrize("num_slots", [100, 333])
def test_the_least_recently_used_of_many_pages_are_evicted(rng, num_slots) -> None:
    """Lists of candidates are used up, skipped and rebuilt; batches have few or many pages."""
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
        tier.assign(batch[found < 0])
        want.update(dict.fromkeys(batch[found < 0].tolist()))
        assert set(np.flatnonzero(tier.look_up(np.arange(1000)) >= 0).tolist()) == set(want)
        check(tier)


def test_a_pinned_page_is_never_replaced() -> None:
    tier = Tier(10, 3)
    kept = tier.assign(pages(0, 1))
    tier.pin(kept)
    assert tier.assign(pages(2))[0] >= 0
    assert (tier.assign(pages(3, 4)) >= 0).sum() == 1  # in 2's slot; the others are pinned
    assert np.array_equal(tier.look_up(pages(0, 1)), kept)
    check(tier)
    with pytest.raises(AssertionError, match="in use"):
        tier.drop(kept[:1])
    tier.unpin(kept)
    with pytest.raises(AssertionError, match="not pinned"):
        tier.unpin(kept)


def test_assign_without_evict_takes_free_slots_only() -> None:
    tier = Tier(10, 2)
    tier.assign(pages(0))
    assert (tier.assign(pages(1, 2, 3), evict=False) == NOWHERE).tolist() == [False, True, True]
    assert tier.look_up(pages(0))[0] >= 0
    check(tier)


@pytest.mark.parametrize(
    ("what", "where", "value"), [("_slot_of", 0, 1), ("_page_in", 0, 1), ("_pins", 1, 1), ("_free", 0, 0)]
)
def test_check_detects_an_inconsistent_tier(what, where, value) -> None:
    tier = Tier(4, 3)
    assert tier.assign(pages(2)) == [0]
    check(tier)
    getattr(tier, what)[where] = value
    with pytest.raises(AssertionError):
        check(tier)


@pytest.mark.parametrize("refused", [None, "there is no such flag", "at opening", "at the first read"])
def test_a_file_reads_the_same_with_and_without_the_page_cache(tmp_path, monkeypatch, refused) -> None:
    opened, read = os.open, os.preadv

    def refuse_to_open(path, flags):
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, "no direct files")
        return opened(path, flags)

    def refuse_to_read(fd, *arguments):
        if is_direct(fd):
            raise OSError(errno.EINVAL, "no direct reads")
        return read(fd, *arguments)

    if refused == "there is no such flag":
        monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    elif refused == "at opening":
        monkeypatch.setattr(os, "open", refuse_to_open)
    elif refused == "at the first read":
        monkeypatch.setattr(os, "preadv", refuse_to_read)
    data = np.random.default_rng(0).integers(256, size=2 * BLOCK_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    file, into = DiskFile(tmp_path / "file"), aligned_bytes(3 * BLOCK_BYTES)
    file.read(into, 0, at_least=len(data))
    assert np.array_equal(into[: len(data)], data)
    assert file.direct == is_direct(file._fd) and not (refused and file.direct)
    with pytest.raises(DiskError, match=r"ends at byte 8,292 and should extend to 12,288"):
        file.read(into, 0)
    file.close()
    with pytest.raises(DiskError, match="cannot open"):
        DiskFile(tmp_path / "none")


@pytest.mark.parametrize(
    "call", ["open", pytest.param("preadv", marks=pytest.mark.skipif(not O_DIRECT, reason="no direct reads here"))]
)
def test_a_disk_error_is_not_mistaken_for_a_lack_of_direct_reads(tmp_path, monkeypatch, call) -> None:
    def fail(*_) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").write_bytes(bytes(BLOCK_BYTES))
    before, opened = os.listdir("/dev/fd"), os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened(path, flags & ~O_DIRECT))  # O_DIRECT never fails
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError, match=r"cannot open .*: Input/output error; check"):
        DiskFile(tmp_path / "file")
    assert os.listdir("/dev/fd") == before


def test_a_file_that_cannot_be_opened_because_too_many_are_open_is_refused_with_that_advice(tmp_path) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK_BYTES))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(DiskError, match=r"cannot open .*: Too many open files; .* raise the limit of open"):
            DiskFile(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
