"""A build may be killed, starved of disk or raced by another at any moment: the store stays whole."""

import errno
import fcntl
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from csattn.artifact import ArtifactWriter, collect_garbage, scan_store, verify_artifact
from csattn.artifact.durable import require_space, unsynced, write_bytes
from csattn.artifact.lock import BuildLock, StoreUse
from csattn.errors import ArtifactError, StoreFullError
from tests.artifact.builds import SPEC, assert_completes, assert_store_is_sound, write_layers
from tests.artifact.faults import (
    DISK_BROKEN,
    DISK_FULL,
    SYSTEM_CALLS,
    before_call,
    exit_status,
    fork,
    kill_self,
    public_place,
    without_root,
)
from tests.artifact.synthetic import build, make_layer, make_spec, make_token_ids, write_layer

WRITING = ("write", "fsync", "replace", "rename")


def num_calls(tmp_path: Path, calls: tuple[str, ...]) -> int:
    """Return how many of these system calls an undisturbed build makes."""
    with before_call(calls, -1, kill_self) as made:
        build(tmp_path / "undisturbed", SPEC)
    assert set(made) == set(calls)
    return len(made)


def test_a_build_killed_before_any_system_call_leaves_a_sound_store(tmp_path: Path) -> None:
    def build_and_die(store: Path, number: int) -> None:
        with before_call(SYSTEM_CALLS, number, kill_self):
            build(store, SPEC)

    for number in range(num_calls(tmp_path, SYSTEM_CALLS)):
        store = tmp_path / str(number)
        pid = fork(lambda store=store, number=number: build_and_die(store, number))  # type: ignore[misc]
        assert exit_status(pid) == -signal.SIGKILL
        assert_store_is_sound(store)
        assert_completes(store)


def test_a_build_killed_at_random_moments_leaves_a_sound_store(tmp_path: Path, rng: np.random.Generator) -> None:
    spec = make_spec(257, num_layers=6)
    started = time.perf_counter()
    assert exit_status(fork(lambda: build(tmp_path / "undisturbed", spec))) == 0
    build_s = time.perf_counter() - started
    store, resumed, killed, finished = tmp_path / "store", 0, 0, 0
    while killed < 15:
        pid = fork(lambda: build(store, spec))
        time.sleep(float(rng.uniform(0, build_s)))
        os.kill(pid, signal.SIGKILL)
        killed += exit_status(pid) == -signal.SIGKILL
        assert_store_is_sound(store)
        with ArtifactWriter(store, spec, make_token_ids(257)) as writer:
            resumed += writer.finished_layers > 0
            path = writer.finished_path
        if path is not None:
            finished += 1
            assert finished < 500, "the kills come too late"
            path.rename(tmp_path / f"finished-{finished}")
    assert resumed > 0
    assert_completes(store, spec)


@pytest.mark.parametrize(
    ("act", "calls", "error", "message"),
    [
        (DISK_FULL, WRITING, StoreFullError, "No space left on device.*available.*nothing was published"),
        (DISK_BROKEN, (*WRITING, "open"), ArtifactError, "Input/output error; check the store's permissions"),
    ],
    ids=["disk full", "disk broken"],
)
def test_a_disk_that_fails_at_any_call_leaves_a_sound_store(
    tmp_path: Path, act: Callable[[], None], calls: tuple[str, ...], error: type[ArtifactError], message: str
) -> None:
    refused = 0
    for number in range(num_calls(tmp_path, calls)):
        store = tmp_path / str(number)
        sentence = ""
        with before_call(calls, number, act):
            try:
                build(store, SPEC)
            except error as refusal:
                sentence = str(refusal)
        refused += re.search(message, sentence) is not None
        assert not list(store.rglob("*.partial"))
        assert_store_is_sound(store)
        assert_completes(store)
    assert refused >= number - 2  # cleaning up at the end may fail without harm


def test_a_store_where_no_more_files_can_be_opened_is_refused_with_that_advice(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ArtifactError, match=r"Too many open files; .* raise the limit of open files"):
            BuildLock(tmp_path / ".lock").acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_are_flushed_before_and_directories_after_each_rename(tmp_path: Path) -> None:
    with before_call(("write", "open", "fsync", "replace", "rename"), -1, kill_self) as made:
        build(tmp_path, SPEC)
    renames = [i for i, call in enumerate(made) if call == "replace"]
    assert len(renames) >= 2 * SPEC.model.num_layers + 3
    for i in renames:
        assert made[i - 1] == "fsync"  # the file
        assert made[i + 1 : i + 3] == ["open", "fsync"]  # its directory
    publication = made.index("rename")
    assert made[publication + 1 : publication + 3] == ["open", "fsync"]  # the store


def test_writes_on_macos_use_full_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, why = [], errno.ENOTSUP

    def refuse(descriptor: int, operation: int) -> None:
        calls.append((os.fstat(descriptor).st_ino, operation))
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write_bytes(tmp_path / "file", b"data")
    assert calls == [(path.stat().st_ino, 51) for path in (tmp_path / "file", tmp_path)]
    why = errno.EIO
    with pytest.raises(ArtifactError, match="Input/output error; check"):
        write_bytes(tmp_path / "file", b"data")


def test_an_unsynced_build_does_not_call_fsync(tmp_path: Path) -> None:
    with unsynced(), before_call(("fsync", "rename"), -1, kill_self) as made:
        build(tmp_path / "a", SPEC)
    assert made == ["rename"]
    with pytest.raises(ValueError, match="over"), unsynced():
        raise ValueError("over")
    with before_call(("fsync",), -1, kill_self) as made:
        build(tmp_path / "b", SPEC)
    assert made


def test_a_build_that_continues_an_unsynced_one_flushes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unsynced():
        write_layers(tmp_path, 1)
    flushed = set[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    path = build(tmp_path, SPEC)
    assert [file.name for file in path.iterdir() if file.stat().st_ino not in flushed] == []


def test_a_build_over_the_file_size_limit_fails_and_can_be_completed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(StoreFullError, match="File too large"):
            build(tmp_path, SPEC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob("*.partial"))
    assert_completes(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1001]))
    verify_artifact(build(tmp_path, SPEC))


def test_require_space_refuses_more_than_the_free_space(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(StoreFullError, match=r"has [\d,]+ bytes .* free and the build needs 1,000,000,000,000,000,000"):
        require_space(tmp_path, 10**18)


def test_a_read_only_store_refuses_builds_but_finds_its_artifacts() -> None:
    with public_place() as place:
        finished = build(place, SPEC)
        place.chmod(0o555)
        with without_root():
            with pytest.raises(ArtifactError, match="Permission denied; check the store's permissions"):
                build(place, make_spec(71))
            with pytest.raises(ArtifactError, match=r"make the store .*: Permission denied"):
                build(place / "new", SPEC)
            assert build(place, SPEC) == finished
            assert [summary.path for summary in scan_store(place)[0]] == [finished]
        assert [entry.name for entry in place.iterdir()] == [SPEC.artifact_id]


@pytest.mark.parametrize("inside", ["", "store"])
def test_a_store_path_that_is_a_file_is_refused_with_the_reason(inside: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ArtifactError, match=r"cannot make the store .*: a file is in its place; name a directory"):
        build(tmp_path / "notes.txt" / inside, SPEC)


@pytest.mark.parametrize("inside", ["", "store"])
def test_a_store_path_in_an_artifact_is_refused_and_leaves_the_artifact_whole(inside: str, tmp_path: Path) -> None:
    finished = build(tmp_path, SPEC)
    with pytest.raises(ArtifactError, match=rf"an artifact, not a store; give .* in: {re.escape(str(tmp_path))}$"):
        build(finished / inside, make_spec(71))
    verify_artifact(finished)


def test_a_store_without_locks_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks. There, two builders would remove each other's work."""
    finished = build(tmp_path, SPEC)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(
        ArtifactError, match=r"cannot lock .*: No locks available; its file system does not support locks"
    ):
        build(tmp_path, make_spec(71))
    assert build(tmp_path, SPEC) == finished


def test_a_second_builder_waits_and_finds_the_artifact(tmp_path: Path) -> None:
    waits, says_so = os.pipe()

    def signal_waiting() -> None:
        os.write(says_so, b"w")

    def wait_for_the_builder() -> None:
        with ArtifactWriter(tmp_path, SPEC, make_token_ids(70), signal_waiting) as writer:
            assert writer.finished_path is not None

    with ArtifactWriter(tmp_path, SPEC, make_token_ids(70)) as writer:
        pid = fork(wait_for_the_builder)
        assert os.read(waits, 1) == b"w"
        assert collect_garbage(tmp_path) == []  # a build in progress is no garbage
        for layer_idx in range(2):
            write_layer(writer, layer_idx, *make_layer(SPEC, layer_idx))
        writer.finish({}, {})
    assert exit_status(pid) == 0
    assert_completes(tmp_path)


def test_a_waiter_acquires_the_lock_file_that_other_builders_see(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(AssertionError, match="not held"), BuildLock(path):
        pass
    first, second, third = BuildLock(path), BuildLock(path).acquire(), BuildLock(path)
    waiting = threading.Event()
    waiter = threading.Thread(target=lambda: first.acquire(waiting.set))
    waiter.start()
    assert waiting.wait(10)
    time.sleep(0.05)  # let it reach the kernel
    second.release()
    waiter.join(10)
    assert not third.try_acquire()
    first.release()
    assert third.try_acquire()
    third.release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_the_locks_of_its_parent_alone(tmp_path: Path) -> None:
    use = StoreUse(tmp_path)
    use.begin()
    with BuildLock(tmp_path / ".lock").acquire() as lock:
        assert [exit_status(fork(release)) for release in (lock.release, use.end)] == [0, 0]
        assert not BuildLock(tmp_path / ".lock").try_acquire()
    use.end()
    assert list(tmp_path.iterdir()) == []


def test_concurrent_builder_processes_make_one_artifact(tmp_path: Path) -> None:
    for round_number in range(10):
        store = tmp_path / str(round_number)
        pids = [fork(lambda store=store: build(store, SPEC)) for _ in range(4)]  # type: ignore[misc]
        assert [exit_status(pid) for pid in pids] == [0] * 4
        assert_completes(store)


def test_concurrent_builder_threads_make_one_artifact(tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build(tmp_path, SPEC))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / SPEC.artifact_id] * 4
    assert_completes(tmp_path)
