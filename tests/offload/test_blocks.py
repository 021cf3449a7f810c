"""Blocks are returned as they were stored, whole or not at all, never confused, and within their budgets."""

import errno
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import block_files
from offload.block_files import BlockFiles
from offload.blocks import BlockName, Blocks, Label
from tests.offload.soundness import check, flush
from workers.serving import kept_store
from workers.serving.kept_store import DiskBudget

BLOCK = 40  # bytes of data


def name(number: int, key: str | None = None) -> BlockName:
    return BlockName(key or f"key{number}", Label(None, label(number)))


def label(number: int) -> bytes:
    return f"block number {number}".encode() * (number + 1)


def data(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(256, size=BLOCK, dtype=np.uint8)


def make(directory: Path, memory: int = 100 * BLOCK, disk: int = 1 << 20) -> Blocks:
    return Blocks(memory, BlockFiles(directory, lambda _: disk))


def found(blocks: Blocks, *names: BlockName) -> list[list[int]]:
    with blocks.hold(names) as held:
        return [block.tolist() for block in held]


def lists(*numbers: int) -> list[list[int]]:
    return [data(number).tolist() for number in numbers]


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_hold_returns_blocks_in_order_up_to_the_first_missing_one(tmp_path) -> None:
    blocks = make(tmp_path)
    for number in (0, 1, 3):
        assert not blocks.holds(name(number))
        assert blocks.put(name(number), data(number))
        assert blocks.holds(name(number))
    assert found(blocks, *map(name, range(4))) == lists(0, 1)
    assert found(blocks, name(2), name(0)) == []
    assert found(blocks) == []
    blocks.close()
    check(blocks)


def test_another_process_finds_blocks_that_were_flushed_to_files(tmp_path) -> None:
    blocks = make(tmp_path)
    for number in range(3):
        blocks.put(name(number), data(number))
    flush(blocks)
    other = make(tmp_path)
    assert other.holds(name(1)) and other.counts.memory_blocks == 0 and other.counts.disk_blocks == 3
    assert found(other, *map(name, range(5))) == lists(0, 1, 2)
    assert other.counts.memory_blocks == 3
    late = make(tmp_path)  # opened before block 7 is written
    blocks.put(name(7), data(7))
    flush(blocks)
    assert found(late, name(7)) == lists(7)
    for each in (blocks, other, late):
        each.close()
        check(each)


def test_memory_stays_within_its_budget_and_evicted_blocks_are_read_from_files(tmp_path) -> None:
    blocks = make(tmp_path, memory=2 * BLOCK + 5)
    for number in range(5):
        blocks.put(name(number), data(number))
        flush(blocks)
    assert blocks.counts.memory_blocks == 2 and blocks.counts.disk_blocks == 5
    assert found(blocks, *map(name, range(5))) == lists(*range(5))  # more than fit in memory at once
    check(blocks)
    with blocks.hold([name(0), name(1)]):
        assert blocks.counts.memory_bytes <= 2 * BLOCK + 5
        assert not blocks.put(name(9), data(9)), "all that is there is in use"
        assert blocks.counts.refused == 1
    assert blocks.put(name(9), data(9))
    blocks.close()


def test_blocks_that_wait_to_be_written_count_towards_the_budget(tmp_path, monkeypatch) -> None:
    go_on, write = threading.Event(), BlockFiles.write

    def slow(*arguments) -> bool:
        go_on.wait()
        return write(*arguments)

    monkeypatch.setattr(BlockFiles, "write", slow)
    blocks = make(tmp_path, memory=2 * BLOCK)
    assert [blocks.put(name(number), data(number)) for number in range(4)] == [True, True, False, False]
    assert found(blocks, name(0), name(1)) == lists(0, 1)
    go_on.set()
    blocks.close()
    assert len(files_of(tmp_path)) == 2


def test_blocks_with_equal_keys_and_different_labels_are_not_confused(tmp_path) -> None:
    """This holds in memory, in a file, and in a file of another process."""
    blocks = make(tmp_path)
    assert blocks.put(name(1, "same"), data(1)) and not blocks.put(name(2, "same"), data(2))
    assert found(blocks, name(2, "same")) == [] and not blocks.holds(name(2, "same"))
    blocks.close()
    other = make(tmp_path)
    assert found(other, name(2, "same")) == [] and not other.holds(name(2, "same"))
    assert found(other, name(1, "same")) == lists(1)
    other.close()


def chain(*own: bytes) -> list[Label]:
    labels = [Label(None, b"all")]
    for part in own:
        labels.append(Label(labels[-1], part))
    return labels


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from([b"a", b"b"]), max_size=5), min_size=2, max_size=6), st.randoms())
def test_labels_are_equal_only_if_their_whole_chains_are_equal(parts, random) -> None:
    """Earlier comparisons do not change the result."""
    labels = [label for own in parts for label in chain(*own)]
    want = [bytes(label) for label in labels]
    for _ in range(100):
        i, j = random.randrange(len(labels)), random.randrange(len(labels))
        assert labels[i].is_same(labels[j]) == (want[i] == want[j])
    assert [bytes(label) for label in labels] == want


def test_comparing_chains_compares_each_label_only_a_few_times(monkeypatch) -> None:
    """The chain of a million tokens is also freed without too deep a recursion."""

    class Counted(bytes):
        num_looks = 0

        def __ne__(self, other: object) -> bool:
            Counted.num_looks += 1
            return bytes.__ne__(self, other)

    own = [Counted(number.to_bytes(4)) for number in range(16_000)]
    for one, other in zip(chain(*own), chain(*own), strict=True):
        assert one.is_same(other)
    assert Counted.num_looks < 3 * len(own)


@pytest.mark.parametrize("at", [0, 9, 20, 70, 110, -1, "short", "long", "empty"])
def test_a_damaged_block_file_is_ignored_and_removed(tmp_path, at) -> None:
    blocks = make(tmp_path)
    blocks.put(name(1), data(1))
    blocks.close()
    [path] = files_of(tmp_path)
    was = path.read_bytes()
    if at == "short":
        path.write_bytes(was[:-3])
    elif at == "long":
        path.write_bytes(was + b"x")
    elif at == "empty":
        path.write_bytes(b"")
    else:
        changed = bytearray(was)
        changed[at] ^= 1
        path.write_bytes(bytes(changed))
    again = make(tmp_path)
    assert found(again, name(1)) == [] and files_of(tmp_path) == []
    assert again.put(name(1), data(1))
    again.close()
    assert files_of(tmp_path)[0].read_bytes() == was


@pytest.mark.parametrize("bit", [0, 7, 40, 62, 63])
def test_a_block_file_with_a_wrong_size_field_is_ignored_and_rewritten(tmp_path, bit) -> None:
    blocks = make(tmp_path)
    blocks.put(name(1), data(1))
    blocks.close()
    [path] = files_of(tmp_path)
    was = bytearray(path.read_bytes())
    was[12 + bit // 8] ^= 1 << bit % 8  # in the field of the data's size
    path.write_bytes(was)
    again = make(tmp_path)
    assert not again.holds(name(1))
    assert again.put(name(1), data(1))
    again.close()
    assert bytes(was) != path.read_bytes()
    assert BlockFiles(tmp_path, lambda _: 1 << 20).read("key1", label(1)).tolist() == data(1).tolist()


def test_a_block_that_cannot_be_written_does_not_block_others(tmp_path, monkeypatch, caplog) -> None:
    write = BlockFiles.write

    def fail_at_first(files, key, *more) -> bool:
        if key == "key1":
            raise ValueError("not this one")
        return write(files, key, *more)

    monkeypatch.setattr(BlockFiles, "write", fail_at_first)
    blocks = make(tmp_path)
    for number in (1, 2):
        blocks.put(name(number), data(number))
    flush(blocks)
    blocks.close()
    assert [path.stem for path in files_of(tmp_path)] == ["key2"] and blocks.counts.refused == 1
    assert "block key1 is not written" in caplog.text and "not this one" in caplog.text
    check(blocks)


def test_block_files_stay_within_their_budget_and_the_least_recently_used_are_removed(tmp_path) -> None:
    size = 64 + BLOCK + len(label(1))
    files = BlockFiles(tmp_path, lambda _: 10 * size + 5 * 200)
    for number in range(20):
        assert files.write(name(number).key, label(number), data(number))
        os.utime(tmp_path / f"key{number}.block", (1000 + number, 1000 + number))
        if number > 3:
            assert files.read("key3", label(3)) is not None, "what is used stays"
        assert files.num_bytes <= 10 * size + 5 * 200
        assert files.num_bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    left = {path.stem for path in files_of(tmp_path)}
    assert "key3" in left and "key19" in left and "key0" not in left and len(left) < 15
    small = BlockFiles(tmp_path, lambda _: 50)
    assert not small.write("big", b"", data(0)), "what is larger than all of it is not kept"
    assert small.num_refused == 1


def test_a_block_found_in_memory_counts_as_used_on_disk(tmp_path) -> None:
    """Otherwise the first blocks of all conversations, which are always in memory, would be removed first."""
    blocks = make(tmp_path, disk=2000)
    for number in range(20):
        assert blocks.put(name(number), data(number))
        flush(blocks)
        os.utime(tmp_path / f"key{number}.block", (1000 + number, 1000 + number))
        assert found(blocks, name(0)) == lists(0)
    blocks.close()
    assert "key0" in {path.stem for path in files_of(tmp_path)} and len(files_of(tmp_path)) < 15


@pytest.mark.parametrize("num_processes", [2, 5])
def test_processes_that_share_a_directory_stay_within_one_budget(tmp_path, num_processes) -> None:
    """Each may exceed it by a tenth: what it has written since it last looked at what others have written."""
    budget = 100 * (64 + BLOCK)
    processes = [BlockFiles(tmp_path, lambda _: budget) for _ in range(num_processes)]
    for number in range(300):
        for process, files in enumerate(processes):
            assert files.write(f"key{process}x{number}", b"", data(number))
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= (1 + 0.11 * num_processes) * budget


def test_block_files_last_used_in_the_future_are_removed_first(tmp_path) -> None:
    """Otherwise they would count as recently used for years, and new files would be removed instead."""
    files, to_come = BlockFiles(tmp_path, lambda _: 4 * (64 + BLOCK)), time.time() + 1e7
    for number in range(8):
        assert files.write(f"key{number}", b"", data(number))
        used_at = to_come if number < 2 else 1000 + number
        os.utime(tmp_path / f"key{number}.block", (used_at, used_at))
    assert [path.stem for path in files_of(tmp_path)] == ["key4", "key5", "key6", "key7"]


def test_block_files_take_at_most_half_of_a_small_disk_and_log_it_once(tmp_path, monkeypatch, caplog) -> None:
    size = 64 + BLOCK + len(label(1)) + 5
    files = BlockFiles(tmp_path, DiskBudget("kept.disk_bytes", 1 << 40, tmp_path).find)
    monkeypatch.setattr(
        kept_store, "available_bytes", lambda path: 20 * size - sum(f.stat().st_size for f in path.iterdir())
    )
    caplog.set_level("INFO")
    for number in range(20):
        assert files.write(name(number).key, label(number), data(number))
    assert 5 * size < files.num_bytes <= 10 * size
    assert caplog.text.count("kept.disk_bytes is 1024.00 GiB, but for now the limit is 1.") == 1 == len(caplog.records)


@pytest.mark.parametrize("failing", ["write", "rename", "mkdir"])
def test_a_full_disk_leaves_no_partial_block_file(tmp_path, monkeypatch, caplog, failing) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFile:
        def __init__(self, file) -> None:
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self._file.close()

        def write(self, some) -> None:
            self._file.write(bytes(some)[:7])
            full()

    with monkeypatch.context() as patch:
        if failing == "write":
            opened = Path.open
            patch.setattr(
                Path, "open", lambda path, mode: FullFile(opened(path, mode)) if "w" in mode else opened(path, mode)
            )
        else:
            patch.setattr(Path, {"rename": "replace", "mkdir": "mkdir"}[failing], full)
        blocks = make(tmp_path)
        for number in range(2):
            assert blocks.put(name(number), data(number))
            flush(blocks)
        assert found(blocks, name(0), name(1)) == lists(0, 1), "memory has them still"
        assert files_of(tmp_path) == [] and blocks.counts.refused == 2
        assert caplog.text.count("No space left") == 1
        patch.setattr(block_files, "_LOG_EVERY_S", 0.0)
        assert blocks.put(name(2), data(2))
        flush(blocks)
        assert caplog.text.count("No space left") == 2 and "(3 so far)" in caplog.text
    blocks.put(name(3), data(3))
    blocks.close()
    assert len(files_of(tmp_path)) == 1


def test_partial_files_of_a_killed_process_are_ignored_and_removed_once_old(tmp_path) -> None:
    young, old = tmp_path / "key1.aaaa.partial", tmp_path / "key2.bbbb.partial"
    for path in (young, old):
        path.write_bytes(b"csblock1")
    os.utime(old, (1, 1))
    blocks = make(tmp_path)
    assert found(blocks, name(1)) == [] and found(blocks, name(2)) == []
    assert files_of(tmp_path) == [young], "another process may still write it"
    blocks.close()


def test_a_block_read_from_a_file_holds_only_its_own_memory(tmp_path, monkeypatch) -> None:
    """It does not keep its label's memory, which may be many times as large. Without memory for it, it is not found."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    files = BlockFiles(tmp_path, lambda _: 1 << 20)
    assert files.write("key", bytes(5000), data(1))
    read = files.read("key", bytes(5000))
    assert read is not None and read.base is None and read.tolist() == data(1).tolist()
    monkeypatch.setattr(np, "fromfile", fail)
    assert files.read("key", bytes(5000)) is None


def test_a_file_that_a_reader_removes_during_eviction_is_no_error(tmp_path, monkeypatch) -> None:
    files, unlink = BlockFiles(tmp_path, lambda _: 1000), Path.unlink
    for number in range(5):
        files.write(f"key{number}", b"", data(number))
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    def unlink_all(path: Path) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        for number in range(5):
            files.read(f"key{number}", b"")

    monkeypatch.setattr(Path, "unlink", unlink_all)
    assert files.write("another", b"", np.zeros(500, np.uint8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 4))
def test_without_files_the_least_recently_used_block_is_evicted(operations, room) -> None:
    """The definition is a dictionary in the order of use."""
    blocks, want = Blocks(room * BLOCK, None), OrderedDict()
    for number, puts in operations:
        if puts:
            blocks.put(name(number), data(number))
            if number not in want:
                if len(want) == room:
                    want.popitem(last=False)
                want[number] = None
        else:
            assert found(blocks, name(number)) == (lists(number) if number in want else [])
            if number in want:
                want.move_to_end(number)
        check(blocks)
        assert {n for n in range(10) if blocks.holds(name(n))} == set(want)
    blocks.close()


def test_concurrent_threads_read_and_put_correct_blocks(tmp_path) -> None:
    blocks, wrong = make(tmp_path, memory=4 * BLOCK), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            first = int(rng.integers(12))
            names = [name(number) for number in range(first, first + 3)]
            with blocks.hold(names) as held:
                if [block.tolist() for block in held] != lists(*range(first, first + 3))[: len(held)]:
                    wrong.append(first)
            blocks.put(name(first), data(first))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks.close()
    check(blocks)
    assert not wrong and blocks.counts.memory_bytes <= 4 * BLOCK
