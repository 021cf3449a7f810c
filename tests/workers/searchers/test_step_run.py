"""Whole steps searched by workers: the choices are those of one thread, even if workers die, hang or fail."""

import random
import signal
import threading
from pathlib import Path

import pytest

from csattn.artifact import Artifact
from csattn.errors import SearchLostError
from csattn.search import SearchPool
from tests.workers.searchers.children import Children
from tests.workers.searchers.searching import Threads, make_artifact, wait_until
from tests.workers.searchers.stepping import Device, later
from workers.searchers import step_run, worker_searcher
from workers.searchers.step_searches import StepSearches
from workers.searchers.worker import SearchWorker
from workers.searchers.worker_searcher import WorkerSearcher


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    store = tmp_path_factory.mktemp("store")
    return [make_artifact(store, length, num_kv_heads=4, num_layers=6) for length in (3000, 9000)]


def load(searcher: WorkerSearcher | StepSearches, device: Device) -> None:
    searcher.attach(device.memory)
    for context_id, artifact in enumerate(device.artifacts):
        searcher.load(context_id, artifact)


def test_threads_of_this_process_choose_as_one_thread(artifacts: list[Artifact]) -> None:
    device = Device(artifacts, [1, 0, 1], 90)
    with SearchPool(2) as pool:
        searches = StepSearches(pool)
        load(searches, device)
        for seed in range(3):
            device.take_step(searches.run_step, seed)


@pytest.mark.parametrize("num_workers", [1, 3, 7])
@pytest.mark.parametrize("contexts", [[0], [1, 0, 1]])
def test_workers_choose_as_one_thread(artifacts: list[Artifact], num_workers: int, contexts: list[int]) -> None:
    """Also with more workers than index heads."""
    device = Device(artifacts, contexts, 90)
    with WorkerSearcher(num_workers, launch=Threads()) as searcher:
        load(searcher, device)
        for seed in range(3):
            device.take_step(searcher.run_step, seed)
        assert searcher.health().num_searched_here == 0


def test_workers_choose_as_one_thread_over_lists(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path, 500, "lists")
    device = Device([artifact], [0, 0], 40)
    with WorkerSearcher(2, launch=Threads()) as searcher:
        load(searcher, device)
        device.take_step(searcher.run_step, 1)


def test_alternating_plans_and_replaced_contexts_choose_as_one_thread(artifacts: list[Artifact]) -> None:
    """Steps of two plans alternate; then another context is loaded under the same id."""
    device = Device(artifacts, [0, 1], 90)
    with WorkerSearcher(2, launch=Threads()) as searcher:
        load(searcher, device)
        device.take_step(searcher.run_step, 1)
        first = device.plan
        device.plan = type(first)(first.records)
        device.take_step(searcher.run_step, 2)
        device.plan = first
        device.take_step(searcher.run_step, 3)
        searcher.unload(1)
        device.artifacts = [artifacts[0], artifacts[0]]
        searcher.load(1, artifacts[0])
        device.take_step(searcher.run_step, 4)


def test_choices_are_correct_if_a_worker_is_killed_at_any_layer(artifacts: list[Artifact], children: Children) -> None:
    device = Device(artifacts, [0, 1], 90)
    with WorkerSearcher(2, launch=children) as searcher:
        load(searcher, device)
        random_ = random.Random(3)
        for seed in range(12):
            wait_until(lambda: searcher.health().num_alive == 2)
            at, victim, delay_s = seed % 6, seed % 2, random_.uniform(0, 0.004)

            def kill(layer_idx: int, at: int = at, victim: int = victim, delay_s: float = delay_s) -> None:
                if layer_idx == at:
                    later(delay_s, lambda: children.signal(victim, signal.SIGKILL))

            device.take_step(searcher.run_step, seed, kill)
            wait_until(lambda seed=seed: searcher.health().num_losses > seed)
        assert searcher.health().num_searched_here >= 3  # the others died after their last search
        wait_until(lambda: searcher.health().num_alive == 2)
        before = searcher.health().num_searched_here
        device.take_step(searcher.run_step, 99)
        assert searcher.health().num_searched_here == before


def test_choices_are_correct_if_all_workers_are_killed(artifacts: list[Artifact], children: Children) -> None:
    device = Device(artifacts, [1], 90)
    with WorkerSearcher(2, launch=children) as searcher:
        load(searcher, device)

        def kill(layer_idx: int) -> None:
            if layer_idx in (1, 3):
                children.signal(layer_idx // 2, signal.SIGKILL)
                wait_until(lambda: not all(k.channel for k in searcher._supervisors))

        device.take_step(searcher.run_step, 1, kill)
        assert searcher.health().num_searched_here == 2


def test_a_worker_that_hangs_is_ended_before_its_share_is_searched(
    artifacts: list[Artifact], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_searcher, "HUNG_S", 0.2)
    device = Device(artifacts, [0], 90)
    with WorkerSearcher(2, launch=children) as searcher:
        load(searcher, device)
        stopped = children.latest[1].pid

        def stop(layer_idx: int) -> None:
            if layer_idx == 2:
                children.signal(1, signal.SIGSTOP)

        device.take_step(searcher.run_step, 1, stop)
        assert searcher.health().num_searched_here == 1
        wait_until(lambda: children.latest[1].pid != stopped)


def test_a_step_waits_for_a_slow_device(
    artifacts: list[Artifact], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_searcher, "HUNG_S", 0.05)
    device = Device(artifacts, [0], 90)
    with WorkerSearcher(1, launch=children) as searcher:
        load(searcher, device)
        device.take_step(searcher.run_step, 1, lambda layer_idx: threading.Event().wait(0.4 * (layer_idx == 4)))
        assert searcher.health().num_losses == 0 or searcher.health().num_searched_here


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_that_is_given_up_ends_and_the_next_one_succeeds(
    artifacts: list[Artifact], children: Children, killed: bool
) -> None:
    device = Device(artifacts, [0], 90)
    with WorkerSearcher(2, launch=children) as searcher:
        load(searcher, device)
        ended: list[bool | BaseException] = []
        device.num_steps += 1
        thread = threading.Thread(target=device._run, args=(searcher.run_step, ended), daemon=True)
        thread.start()
        if killed:
            children.signal(0, signal.SIGKILL)
            wait_until(lambda: searcher._supervisors[0].channel is None)
        device.give_up[0] = 1
        thread.join(30)
        assert ended == [False]
        device.give_up[0] = 0
        wait_until(lambda: searcher.health().num_alive == 2)
        device.take_step(searcher.run_step, 1)


def test_a_step_that_also_fails_in_this_process_raises_search_lost_error(
    artifacts: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    device = Device(artifacts, [0], 90)
    with WorkerSearcher(2, launch=Threads()) as searcher:
        load(searcher, device)
        monkeypatch.setattr(SearchWorker, "_execute", fail)
        device.take_step(searcher.run_step, 1)  # the workers fail, and this process searches
        assert "the disk is gone" in searcher.health().fault
        monkeypatch.setattr(step_run.StepSearches, "run_records", fail)
        with pytest.raises(SearchLostError, match=r"cannot be searched here \(OSError: the disk is gone\); ask"):
            searcher.run_step(device.plan, device.since + 100)
