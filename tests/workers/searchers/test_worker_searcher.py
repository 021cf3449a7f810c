"""Workers choose what one thread chooses, however the work is divided; kept plans and memory stay bounded."""

import gc
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csattn.cpu import posts
from csattn.cpu.addresses import compiled_address
from csattn.errors import ConfigError, SearchLostError
from csattn.search import work
from tests.workers.searchers.searching import Threads, make_artifact, make_step, search_layer, wait_until
from workers.searchers import channel, step_searches, words, worker_searcher
from workers.searchers.rendezvous import Rendezvous, connect
from workers.searchers.supervisor import Supervisor
from workers.searchers.worker import choose_cpus
from workers.searchers.worker_searcher import WorkerSearcher, choose_spins

KERNELS = [work.begin, work.finish, posts.await_others, words.post, words.await_word]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_any_number_of_workers_chooses_what_one_thread_chooses(num_workers: int, store: Path) -> None:
    sketch, lists = make_artifact(store), make_artifact(store, 1500, "lists", num_kv_heads=2)
    alone = make_artifact(store, 700, "lists", share_group=False)
    artifacts = {3: sketch, 0: lists, 7: alone}

    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(sorted(artifacts)),
                st.integers(0, 5),  # rows
                st.sampled_from([0, 1, 15, 300]),  # top_k
                st.sampled_from([(0, 1), (4, 32), (1000, 1000)]),  # sinks and window; the last leaves no rows between
            ),
            max_size=5,
        ),
        layer_idx=st.integers(0, 2),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    def check(steps, layer_idx, seed) -> None:
        searches = [
            make_step(artifacts[context_id], num_rows, top_k, seed + turn, context_id, *resident, context_id == 3)
            for turn, (context_id, num_rows, top_k, resident) in enumerate(steps)
        ]
        search_layer(searcher, searches, artifacts, layer_idx)

    with WorkerSearcher(num_workers, launch=Threads()) as searcher:
        for context_id, artifact in artifacts.items():
            searcher.load(context_id, artifact)
        check()
        assert searcher.health().num_searched_here == 0
        assert searcher.health().num_losses == 0


def test_two_worker_processes_choose_what_one_thread_chooses(store: Path) -> None:
    artifacts = {0: make_artifact(store)}
    with WorkerSearcher(2) as searcher:
        searcher.load(0, artifacts[0])
        for turn in range(9):
            search_layer(
                searcher, [make_step(artifacts[0], 1 + turn % 4, 20, turn, wants_rest=True)], artifacts, turn % 3
            )
        assert searcher.health().num_searched_here == 0


def test_shared_memory_grows_for_larger_steps(store: Path) -> None:
    artifact = make_artifact(store, 4000)
    launch = Threads()
    with WorkerSearcher(2, launch=launch) as searcher:
        searcher.load(0, artifact)
        sizes = []
        for num_rows, top_k in [(1, 5), (8, 3000), (1, 5), (40, 3900), (40, 3900), (2, 100)]:
            search_layer(searcher, [make_step(artifact, num_rows, top_k)], {0: artifact}, 1)
            sizes.append(len(searcher._memory.array))
        assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[3] == sizes[5]
        assert searcher.health().num_searched_here == 0
        assert launch.started[0].worker._num_answers == 7 + len(set(sizes))


def test_no_kernel_is_compiled_again_for_mapped_arrays(store: Path) -> None:
    artifacts = {0: make_artifact(store), 1: make_artifact(store, 900, "lists")}
    with WorkerSearcher(2, launch=Threads()) as searcher:
        for context_id, artifact in artifacts.items():
            assert not artifact.layer_index(0).key_mean.flags.writeable
            searcher.load(context_id, artifact)
        versions = [len(kernel.signatures) for kernel in KERNELS]
        stages = compiled_address.cache_info().currsize
        assert all(versions), "loading has left something to compile"
        for turn in range(6):
            searches = [make_step(artifacts[turn % 2], 1 + turn, 10 * turn, context_id=turn % 2)]
            search_layer(searcher, searches, artifacts, turn % 3)
        assert [len(kernel.signatures) for kernel in KERNELS] == versions
        assert compiled_address.cache_info().currsize == stages


def test_a_repeated_step_reuses_the_searches_of_the_worker(store: Path) -> None:
    """Queries change, addresses do not: the worker recognises the plan, whatever steps came in between."""
    artifact = make_artifact(store)
    launch = Threads()
    with WorkerSearcher(1, launch=launch) as searcher:
        searcher.load(0, artifact)
        for turn in range(12):
            search_layer(searcher, [make_step(artifact, 1 + turn % 2, 20, turn)], {0: artifact}, turn % 3)
            if turn == 5:
                kept = set(launch.started[0].worker._searches._series)
        assert set(launch.started[0].worker._searches._series) == kept and len(kept) == 6


def test_workers_keep_at_most_max_plans_and_still_choose_correctly(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (channel, step_searches, worker_searcher):
        monkeypatch.setattr(module, "MAX_PLANS", 2)
    artifact = make_artifact(store)
    launch = Threads()
    with WorkerSearcher(2, launch=launch) as searcher:
        searcher.load(0, artifact)
        for turn in range(20):
            search_layer(searcher, [make_step(artifact, 1 + turn % 5 % 3, 20, turn)], {0: artifact}, turn % 3)
            for started in launch.started:
                searches = started.worker._searches
                assert len(searches._plans) <= 2 and {plan for plan, _ in searches._series} <= set(searches._plans)
        assert searcher.health().num_searched_here == 0


def test_contexts_can_be_loaded_replaced_and_unloaded(store: Path) -> None:
    short, long = make_artifact(store), make_artifact(store, 700)
    launch = Threads()
    with WorkerSearcher(2, launch=launch) as searcher:
        searcher.load(0, short)
        search_layer(searcher, [make_step(short, 2, 20)], {0: short}, 0)
        searcher.load(0, long)  # the same id for another context
        search_layer(searcher, [make_step(long, 2, 20)], {0: long}, 0)
        searcher.unload(0)
        with pytest.raises(AssertionError, match="context 0 is not loaded"):
            searcher.start(0, [make_step(long, 2, 20)])
        searcher.load(1, short)
        search_layer(searcher, [make_step(short, 2, 20, context_id=1)], {1: short}, 2)
        assert {tuple(started.worker._searches._layers) for started in launch.started} == {(1,)}
        assert searcher.health().num_searched_here == 0


def test_a_context_that_workers_cannot_open_is_refused(store: Path, tmp_path: Path) -> None:
    sound, gone = make_artifact(store), make_artifact(tmp_path)
    with WorkerSearcher(2, launch=Threads()) as searcher:
        searcher.load(0, sound)
        gone.path.rename(tmp_path / "moved")
        with pytest.raises(SearchLostError, match=r"cannot load .*ArtifactNotFoundError"):
            searcher.load(1, gone)
        search_layer(searcher, [make_step(sound, 2, 20)], {0: sound}, 0)
        assert searcher.health().num_alive == 2


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are texts on other systems")
def test_a_store_path_need_not_be_valid_utf8(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / os.fsdecode(b"caf\xe9"))
    with WorkerSearcher(1, launch=Threads()) as searcher:
        searcher.load(0, artifact)
        search_layer(searcher, [make_step(artifact, 2, 20)], {0: artifact}, 0)
        assert searcher.health().num_searched_here == 0


def test_an_unfinished_search_does_not_affect_the_next(store: Path) -> None:
    artifact = make_artifact(store)
    with WorkerSearcher(2, launch=Threads()) as searcher:
        searcher.load(0, artifact)
        for turn in range(20):
            searcher.start(turn % 3, [make_step(artifact, 3, 30, turn)])
            search_layer(searcher, [make_step(artifact, 3, 30, 100 + turn)], {0: artifact}, (turn + 1) % 3)


def test_spinning_and_sleeping_workers_choose_the_same(store: Path) -> None:
    artifact = make_artifact(store)
    for spin_us in (0.0, 5.0, 3000.0):
        with WorkerSearcher(2, spin_us=spin_us, launch=Threads()) as searcher:
            searcher.load(0, artifact)
            for turn in range(30):
                search_layer(searcher, [make_step(artifact, 1, 30, turn)], {0: artifact}, turn % 3)
            assert searcher.health().num_searched_here == 0, "somebody was not woken up"


@pytest.mark.parametrize(
    ("num_cpus", "num_threads", "client_spins", "workers_spin"),
    [(1, 1, False, False), (2, 1, True, True), (2, 2, False, False), (16, 8, True, True), (16, 9, True, False)],
)
def test_client_and_workers_spin_only_where_there_are_enough_cpus(
    num_cpus, num_threads, client_spins, workers_spin
) -> None:
    client_us, worker_us = choose_spins(num_cpus, num_threads)
    assert (client_us > 0, worker_us > 0) == (client_spins, workers_spin)


def test_invalid_numbers_of_workers_or_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 search workers of 1 threads cannot search"):
        WorkerSearcher(0, launch=Threads())
    with pytest.raises(ConfigError, match="got 1 CPUs for 2 search workers of 2 threads"):
        WorkerSearcher(2, threads_per_worker=2, cpus=[0], launch=Threads())


def test_socket_files_have_short_paths_despite_a_long_temporary_directory(monkeypatch, tmp_path: Path) -> None:
    """As on macOS, where a socket's path has at most 103 bytes."""
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(sys, "platform", "darwin")
    with closing(Rendezvous()) as meeting, connect(meeting.address), meeting.accept(10, lambda: None):
        assert len(meeting.address) < 80
    assert not Path(meeting.address).parent.exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not let threads keep to CPUs")
def test_worker_threads_run_only_on_their_cpus(store: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    artifact, launch = make_artifact(store), Threads()
    with WorkerSearcher(1, threads_per_worker=2, cpus=[cpu, cpu], launch=launch) as searcher:
        searcher.load(0, artifact)
        search_layer(searcher, [make_step(artifact, 2, 30)], {0: artifact}, 0)
        assert os.sched_getaffinity(launch.started[0].thread.native_id) == {cpu}
        assert os.sched_getaffinity(0) != {cpu} or os.cpu_count() == 1
    assert choose_cpus(10**6) is None


def test_an_error_of_the_launcher_is_reported() -> None:
    def launch(spec):
        raise RuntimeError("no room on this node")

    with pytest.raises(SearchLostError, match="do not start: RuntimeError: no room on this node"):
        WorkerSearcher(2, launch=launch)


def test_a_worker_that_exits_while_starting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SearchLostError, match="has ended with exit status 1"):
        WorkerSearcher(1)


def test_started_workers_are_ended_if_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(*arguments: object) -> Supervisor:
        if supervisors:
            raise RuntimeError("can't start new thread")
        supervisors.append(Supervisor(*arguments))
        return supervisors[0]

    supervisors: list[Supervisor] = []
    monkeypatch.setattr(worker_searcher, "Supervisor", supervise)
    with pytest.raises(RuntimeError, match="can't start"):
        WorkerSearcher(2, launch=Threads())
    gc.collect()
    assert not supervisors[0]._thread.is_alive()


def test_close_ends_the_workers_and_may_be_called_twice(store: Path) -> None:
    launch = Threads()
    searcher = WorkerSearcher(2, launch=launch)
    searcher.start(0, [])
    searcher.finish()
    searcher.close()
    searcher.close()
    wait_until(lambda: not any(started.thread.is_alive() for started in launch.started))
    assert searcher.health().num_losses == 0
