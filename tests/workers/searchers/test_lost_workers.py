"""Workers that die, hang or fail at any point: the selections stay the same, and lost workers are soon replaced."""

import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from csattn.artifact import Artifact
from csattn.errors import SearchLostError
from offload.shared_memory import SharedMemory
from tests.workers.searchers.children import Children, named_files, runs
from tests.workers.searchers.searching import (
    WAIT_S,
    Threads,
    assert_chosen_as_in_process,
    make_artifact,
    make_step,
    search_layer,
    wait_until,
)
from workers.searchers import channel, worker_searcher
from workers.searchers.mail import KIND, STEP
from workers.searchers.process import ChildProcess
from workers.searchers.step_searches import StepSearches
from workers.searchers.worker import SearchWorker, WorkerSpec
from workers.searchers.worker_searcher import WorkerSearcher

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("store"), 20_000, num_kv_heads=4)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """On a busy machine, workers that do not hang may seem to: tests of hangs set less."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(worker_searcher, "HUNG_S", 60.0)
        yield


def test_selections_are_correct_while_workers_are_killed_at_random_times(
    artifact: Artifact, children: Children
) -> None:
    """Another thread kills them, at any point of a search, of their start and of a load."""
    random_ = random.Random(1)
    stop = threading.Event()
    num_kills = 0

    def kill_some() -> None:
        nonlocal num_kills
        while not stop.is_set():
            number = random_.randrange(2)
            wait_until(
                lambda number=number: searcher._supervisors[number].channel is not None or random_.random() < 0.002
            )
            time.sleep(random_.uniform(0.0, 0.02))
            children.signal(number, signal.SIGKILL)
            num_kills += 1

    with WorkerSearcher(2, launch=children) as searcher:
        searcher.load(0, artifact)
        killer = threading.Thread(target=kill_some)
        killer.start()
        slowest_s, turn = 0.0, 0
        try:
            # fewer losses than kills: some die while they start; fewer shares searched here: some die between searches
            while num_kills < 20 or searcher.health().num_losses < 8 or searcher.health().num_searched_here < 5:
                searches = [make_step(artifact, 1 + turn % 3, 900, turn)]
                if turn % 5 == 0:
                    searcher.unload(1)
                    searcher.load(1, artifact)
                began = time.monotonic()
                searcher.start(turn % 3, searches)
                searcher.finish()
                slowest_s = max(slowest_s, time.monotonic() - began)
                assert_chosen_as_in_process(searches, {0: artifact}, turn % 3)
                turn += 1
        finally:
            stop.set()
            killer.join()
        assert slowest_s < 10
        wait_until(lambda: searcher.health().num_alive == 2)
        search_layer(searcher, [make_step(artifact, 3, 900)], {0: artifact}, 0)


def test_a_killed_worker_is_noticed_without_a_timeout_and_replaced(artifact: Artifact, children: Children) -> None:
    with WorkerSearcher(2, launch=children) as searcher:
        searcher.load(0, artifact)
        searches = [make_step(artifact, 2, 900)]
        search_layer(searcher, searches, {0: artifact}, 0)
        children.signal(1, signal.SIGKILL)  # while it is idle
        wait_until(lambda: searcher.health().num_alive == 1)
        search_layer(searcher, searches, {0: artifact}, 1)
        assert searcher.health().num_searched_here == 1
        wait_until(lambda: searcher.health().num_alive == 2)
        search_layer(searcher, searches, {0: artifact}, 2)
        assert searcher.health().num_searched_here == 1
        children.signal(0, signal.SIGSTOP)
        searcher.start(0, searches)
        children.signal(0, signal.SIGKILL)  # during a search
        began = time.monotonic()
        searcher.finish()
        assert time.monotonic() - began < 20
        assert_chosen_as_in_process(searches, {0: artifact}, 0)
        assert searcher.health().num_searched_here == 2


@pytest.mark.parametrize("has_searched", [True, False])
def test_a_worker_that_hangs_is_replaced(
    has_searched: bool, artifact: Artifact, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a search, or while mapping memory for its first one. Memory that it may still write to is not used again."""
    with WorkerSearcher(2, launch=children) as searcher:
        searcher.load(0, artifact)
        if has_searched:
            search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 0)
        monkeypatch.setattr(worker_searcher, "HUNG_S", 0.3)
        memory = searcher._memory
        hung = children.latest[0]
        children.signal(0, signal.SIGSTOP)
        began = time.monotonic()
        search_layer(searcher, [make_step(artifact, 3, 900)], {0: artifact}, 0)  # a kind that has no patience yet
        assert 0.3 <= time.monotonic() - began < 10
        assert searcher._memory is not memory
        wait_until(lambda: not runs(hung.pid))
        monkeypatch.setattr(worker_searcher, "HUNG_S", 60.0)
        wait_until(lambda: searcher.health().num_alive == 2)
        searched_here = searcher.health().num_searched_here  # also for workers that seem hung on a busy machine
        for turn in range(6):
            search_layer(searcher, [make_step(artifact, 2, 900, turn)], {0: artifact}, turn % 3)
        assert searcher.health().num_searched_here == searched_here


def test_a_worker_that_searches_but_does_not_answer_is_replaced(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerSearcher(1, launch=Threads()) as searcher:
        searcher.load(0, artifact)
        search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 0)
        with monkeypatch.context() as patch:
            patch.setattr(worker_searcher, "HUNG_S", 0.3)
            patch.setattr(SearchWorker, "_answer", lambda self: self._execute(self._mail))
            search_layer(searcher, [make_step(artifact, 3, 900)], {0: artifact}, 1)
        assert searcher.health().num_searched_here == 1
        wait_until(lambda: searcher.health().num_alive == 1)
        search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 2)
        assert searcher.health().num_searched_here == 1


def test_a_worker_can_be_ended_through_a_descriptor_above_1023(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2000:
        pytest.skip(f"this process may open {limits[1]} files; the test takes descriptors from 1024 on")
    peer_process = channel._peer_process

    def high(connection: socket.socket) -> int | None:
        if (low := peer_process(connection)) is None:
            return None
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
        finally:
            os.close(low)

    monkeypatch.setattr(channel, "_peer_process", high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2000), limits[1]))
    try:
        with WorkerSearcher(1, launch=children) as searcher:
            worker = children.latest[0]
            searcher._supervisors[0].channel.end_process()
            wait_until(lambda: not runs(worker.pid))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_whose_search_raises_an_error_is_not_replaced(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share is searched in this process, its error is reported, and it takes part in the next search."""
    make_series = StepSearches._make_series

    def fail(self, *asked):
        if self is not searcher._own:
            raise MemoryError("not a byte left")
        return make_series(self, *asked)

    with WorkerSearcher(2, launch=Threads()) as searcher:
        searcher.load(0, artifact)
        with monkeypatch.context() as patch:
            patch.setattr(StepSearches, "_make_series", fail)
            search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 0)
        assert searcher.health().num_searched_here == 2
        assert searcher.health().fault == "MemoryError: not a byte left"
        search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 1)
        assert searcher.health().num_searched_here == 2


def test_a_worker_that_cannot_map_new_memory_is_replaced(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps planned before that are not searched in the old memory."""
    launch = Threads()
    with WorkerSearcher(2, launch=launch) as searcher:
        searcher.load(0, artifact)
        search_layer(searcher, [make_step(artifact, 1, 5)], {0: artifact}, 1)
        searches = launch.started[0].worker._searches
        assert searches is not None
        monkeypatch.setattr(searches, "attach", lambda memory: 1 / 0)
        for num_rows, top_k in ((40, 9000), (1, 5), (2, 5)):
            search_layer(searcher, [make_step(artifact, num_rows, top_k, seed=num_rows)], {0: artifact}, 1)
        wait_until(lambda: searcher.health().num_losses == 1 and searcher.health().num_alive == 2)
        assert "ZeroDivisionError" in searcher.health().fault
        before = searcher.health().num_searched_here
        search_layer(searcher, [make_step(artifact, 1, 5, seed=3)], {0: artifact}, 2)
        assert searcher.health().num_searched_here == before


def test_a_late_worker_of_an_abandoned_step_does_not_write_into_later_steps(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker is a thread, which cannot be killed; the request to the second one fails."""
    begun, go_on, launch, step = threading.Event(), threading.Event(), Threads(), make_step(artifact, 2, 20)
    with WorkerSearcher(2, launch=launch) as searcher:
        searcher.load(0, artifact)
        search_layer(searcher, [step], {0: artifact}, 1)
        asked, second = min(launch.started, key=lambda one: one.worker.spec.number), searcher._supervisors[1].channel
        searches = asked.worker._searches
        assert second is not None and searches is not None
        run = searches.run

        def run_late(*of) -> bool:
            begun.set()
            return go_on.wait(WAIT_S) and run(*of)

        def fail(*_: object) -> None:
            begun.wait(WAIT_S)
            raise SearchLostError("no room")

        monkeypatch.setattr(searches, "run", run_late)
        monkeypatch.setattr(second, "step", fail)
        with pytest.raises(SearchLostError, match="no room"):
            searcher.start(1, [step])
        monkeypatch.undo()
        monkeypatch.setattr(worker_searcher, "HUNG_S", 0.3)
        search_here = searcher._own.run_records

        def search_late(*of) -> bool:
            go_on.set()
            asked.thread.join(WAIT_S)
            return search_here(*of)

        monkeypatch.setattr(searcher._own, "run_records", search_late)
        search_layer(searcher, [make_step(artifact, 3, 50, seed=1)], {0: artifact}, 1)


def test_a_search_that_also_fails_in_this_process_raises_search_lost_error(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self, *asked) -> None:
        raise MemoryError("not a byte left")

    with WorkerSearcher(2, launch=Threads()) as searcher:
        searcher.load(0, artifact)
        with monkeypatch.context() as patch:
            patch.setattr(StepSearches, "_make_series", fail)
            searcher.start(2, [make_step(artifact, 2, 900)])
            with pytest.raises(SearchLostError, match=r"share of the step cannot be searched here .*ask again"):
                searcher.finish()
        search_layer(searcher, [make_step(artifact, 2, 900)], {0: artifact}, 2)


CLIENT = """
import os, signal, sys, threading
from pathlib import Path
from csattn.artifact import open_artifact
from workers.searchers.worker_searcher import WorkerSearcher

artifact = open_artifact(Path(sys.argv[1]))
searcher = WorkerSearcher(1)
searcher.load(0, artifact)
print(*(supervisor.handle.pid for supervisor in searcher._supervisors), flush=True)
"""
IN_STEP = """
from tests.workers.searchers.searching import wait_until
from tests.workers.searchers.stepping import Device

device = Device([artifact], [0], 90)
searcher.attach(device.memory)
threading.Thread(target=device._run, args=(searcher.run_step, []), daemon=True).start()
device._post(0, 1.0)
wait_until(lambda: (device.chosen[0] > 0).all())  # now the worker waits for the second layer's queries
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("end", "status"),
    [(KILL, -signal.SIGKILL), (IN_STEP + KILL, -signal.SIGKILL), ("os.fork() or sys.exit(); os.wait()", 0)],
    ids=["killed", "killed in a step", "not closed, and forked meanwhile"],
)
def test_workers_end_with_their_client(end: str, status: int, artifact: Artifact) -> None:
    files = named_files()
    # Python 3.12 and later warn of a fork in a process with threads, which is what this tests
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", CLIENT + end, str(artifact.path)]
    client = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert client.returncode == status, client.stderr
    pids = [int(pid) for pid in client.stdout.split()]
    assert len(pids) == 1
    wait_until(lambda: not any(runs(pid) for pid in pids))
    assert named_files() == files
    assert not client.stderr


def test_a_worker_without_a_client_ends(artifact: Artifact) -> None:
    child = ChildProcess(WorkerSpec(number=0, address="@csattn-nobody"))
    wait_until(lambda: child.fault() is not None)
    assert child.fault() == "a search worker has ended with exit status 0; look at its output"
    child.kill()


def test_a_worker_is_replaced_though_a_context_has_been_deleted(tmp_path: Path) -> None:
    """This process still has its files open: it searches the context that the new worker cannot open."""
    artifacts = {0: make_artifact(tmp_path), 1: make_artifact(tmp_path, 500)}
    launch = Threads()
    with WorkerSearcher(1, launch=launch) as searcher:
        for context_id, artifact in artifacts.items():
            searcher.load(context_id, artifact)
        shutil.rmtree(artifacts[1].path)
        launch.started[0].kill()
        wait_until(lambda: searcher.health().num_losses == 1 and searcher.health().num_alive == 1)
        assert "ArtifactNotFoundError" in searcher.health().fault
        search_layer(searcher, [make_step(artifacts[0], 2, 20)], artifacts, 0)
        assert searcher.health().num_searched_here == 0
        search_layer(searcher, [make_step(artifacts[1], 2, 20, context_id=1)], artifacts, 0)
        assert searcher.health().num_searched_here == 1


def test_a_worker_is_replaced_though_the_memory_of_steps_is_closed(artifact: Artifact) -> None:
    """Steps will be given new memory; until then none is started."""
    launch = Threads()
    with WorkerSearcher(1, launch=launch) as searcher:
        searcher.load(0, artifact)
        memory = SharedMemory(1 << 16, torch.device("cpu"))
        searcher.attach(memory)
        memory.close()
        launch.started[0].kill()
        wait_until(lambda: searcher.health().num_losses == 1 and searcher.health().num_alive == 1)
        search_layer(searcher, [make_step(artifact, 2, 20)], {0: artifact}, 0)
        assert searcher.health().num_searched_here == 0


def test_a_reused_context_id_is_searched_in_the_new_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when this process searches in the worker's place, and the contexts have the same shapes."""
    first, second = make_artifact(tmp_path), make_artifact(tmp_path, fingerprint="model-b")
    monkeypatch.setattr(SearchWorker, "_execute", lambda self, mail: 1 / 0 if mail.words[KIND] == STEP else None)
    with WorkerSearcher(1, launch=Threads()) as searcher:
        for artifact in (first, second, first):
            searcher.load(0, artifact)
            search_layer(searcher, [make_step(artifact, 2, 20)], {0: artifact}, 1)
        assert searcher.health().num_searched_here == 3
