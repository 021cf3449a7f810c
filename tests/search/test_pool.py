"""A pool's threads choose what one thread does, and no failure makes anyone wait forever."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csattn.cpu import team as teams
from csattn.cpu.posts import INSIDE, LINE, OPENED
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.search import LayerSearch, SearchPool, SearchWorkspace, TokenSelections
from csattn.search.work import TAKEN
from tests.cpu.test_team import count, words
from tests.idle import is_idle
from tests.search.synthetic import IndexSpec, append_keys, make_index, make_queries, make_tail_of

LAYOUTS = ["sketch", "lists"]
ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 120  # longer than kernels take to compile


def make_search(spec: IndexSpec, group_size: int = 2, num_tokens: int = 1, tail_rows: int = 0, top_k: int = 300):
    index = make_index(spec)
    q = np.stack([make_queries(spec, group_size, seed=spec.seed + token) for token in range(num_tokens)])
    shape = num_tokens, spec.num_heads
    out = TokenSelections(np.full((*shape, top_k), -777, np.int32), np.full(shape, -777, np.int32))
    return LayerSearch(q, index, make_tail_of(index, spec, tail_rows), 4, 16, 0.2, out)


def alone(search: LayerSearch) -> np.ndarray:
    """Return what one thread chooses, and poison the search's own output again."""
    search.run(SearchWorkspace())
    chosen = search.out.kv_indices.copy()
    search.out.kv_indices[:] = -777
    return chosen


def run(pool: SearchPool, search: LayerSearch) -> np.ndarray:
    pool.start(search)
    pool.finish()
    return search.out.kv_indices


def big_spec(layout: str = "sketch", seed: int = 0, context_len: int = 70_001) -> IndexSpec:
    return IndexSpec(layout=layout, context_len=context_len, num_heads=2, num_subspaces=4, num_centroids=3, seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_any_number_of_threads_makes_the_same_choice(layout: str, group_size: int, num_threads: int) -> None:
    search = make_search(big_spec(layout), group_size, num_tokens=2, tail_rows=70 * (layout == "lists"), top_k=3000)
    want = alone(search)
    with SearchPool(num_threads) as pool:
        for _ in range(3):
            np.testing.assert_array_equal(run(pool, search), want)


@given(
    layout=st.sampled_from(LAYOUTS),
    context_len=st.sampled_from([1, 4096, 8191, 8192, 8193, 16_385, 40_000]),
    tail_rows=st.sampled_from([0, 1, 65]),
    group_size=st.integers(1, 4),
    num_tokens=st.integers(1, 3),
    top_k=st.integers(0, 5000),
    num_threads=st.integers(2, 4),
)
@settings(max_examples=40, deadline=None)
def test_any_search_chooses_the_same_with_several_threads(
    layout, context_len, tail_rows, group_size, num_tokens, top_k, num_threads
) -> None:
    tail_rows *= layout == "lists"
    search = make_search(big_spec(layout, context_len=context_len), group_size, num_tokens, tail_rows, top_k)
    want = alone(search)
    with SearchPool(num_threads) as pool:
        np.testing.assert_array_equal(run(pool, search), want)
        assert (search.out.valid_len >= 0).all()


def test_a_search_with_more_jobs_than_run_at_a_time_chooses_the_same() -> None:
    search = make_search(big_spec(context_len=9000), num_tokens=70)
    first_token = make_search(big_spec(context_len=9000))
    want = alone(search)
    np.testing.assert_array_equal(want[0], alone(first_token)[0])
    with SearchPool(3) as pool:
        np.testing.assert_array_equal(run(pool, search), want)


def test_a_search_can_be_run_again_with_another_query_and_a_longer_tail() -> None:
    spec = big_spec("lists")
    search = make_search(spec, tail_rows=60)
    with SearchPool(3) as pool:
        run(pool, search)
        search.q[:] = make_queries(spec, 2, seed=99)
        append_keys(search.tail, spec, 10, seed=7)  # beyond the tail's capacity
        got = run(pool, search).copy()
    np.testing.assert_array_equal(got, alone(search))


def test_the_threads_of_the_pool_complete_a_search_without_the_caller() -> None:
    search = make_search(big_spec(context_len=200_000))
    want = alone(search)
    with SearchPool(3) as pool:
        run(pool, search)  # compiles the kernels
        pool.start(search)
        deadline = time.monotonic() + WAIT_S
        while (search.out.kv_indices != want).any():
            assert time.monotonic() < deadline, "the pool's threads do nothing while the caller is away"
            time.sleep(0.001)
        pool.finish()


def test_several_threads_may_use_several_pools_at_the_same_time() -> None:
    searches = [make_search(big_spec(LAYOUTS[seed % 2], seed), group_size=1 + seed % 2) for seed in range(6)]
    wanted = [alone(search) for search in searches]
    wrong: list[int] = []
    with SearchPool(3) as shared, SearchPool(2) as other:

        def use(number: int) -> None:
            for turn in range(30):
                got = run(shared if (turn + number) % 3 else other, searches[number])
                if (got != wanted[number]).any():
                    wrong.append(number)
                searches[number].out.kv_indices[:] = -777

        users = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for user in users:
            user.start()
        for user in users:
            user.join(WAIT_S)
            assert not user.is_alive(), "a search never came to its end"
    assert not wrong


def test_a_thread_that_started_a_search_cannot_start_another_nor_finish_twice() -> None:
    search = make_search(big_spec(context_len=1000))
    with SearchPool(2) as pool:
        with pytest.raises(AssertionError, match="started no search"):
            pool.finish()
        pool.start(search)
        with pytest.raises(AssertionError, match="finish it first"):
            pool.start(search)
        pool.finish()
        with pytest.raises(AssertionError, match="started no search"):
            pool.finish()


def test_close_gives_up_started_searches_and_ends_the_threads() -> None:
    search = make_search(big_spec())
    with SearchPool(3) as pool:
        run(pool, search)
        threads = pool._helpers.threads
        pool.start(search)
    assert threads and not any(thread.is_alive() for thread in threads)
    pool.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        pool.start(search)
    with pytest.raises(RuntimeError, match="closed; make another"):  # and the lock is free
        pool.start(search)


def test_threads_end_when_their_pool_is_garbage_collected() -> None:
    search = make_search(big_spec())
    pool = SearchPool(3)
    run(pool, search)
    threads = list(pool._helpers.threads)
    pool.start(search)
    del pool
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_searches_fail_after_a_thread_of_the_pool_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    search = make_search(big_spec())

    def fail(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("not a byte left")

    with SearchPool(3) as pool:
        monkeypatch.setattr(teams, "poll_for_work", fail)
        pool._helpers.start()
        for thread in pool._helpers.threads:
            thread.join(WAIT_S)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="make another") as caught:
                pool.start(search)
            assert isinstance(caught.value.__cause__, MemoryError)


def test_waiting_for_a_piece_of_a_failed_thread_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread dies with pieces that it has taken, the threads that wait for them get an error."""
    search = make_search(big_spec())
    taken = threading.Event()

    def take_and_fail(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        while not pool._workspace.control[OPENED]:
            time.sleep(0.001)
        pool._workspace.progress[TAKEN::LINE] |= 1  # the first piece of every stage
        taken.set()
        time.sleep(0.05)
        raise MemoryError("not a byte left")

    with SearchPool(2) as pool:
        monkeypatch.setattr(teams, "poll_for_work", take_and_fail)
        pool.start(search)
        assert taken.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="a thread of the search pool has failed"):
            pool.finish()


def test_a_search_is_released_only_after_no_thread_reads_it() -> None:
    """A late thread finds no work left, but reads the search's record to find that out."""
    search, has_ended = make_search(big_spec()), threading.Event()

    def search_with_a_late_thread() -> None:
        pool.start(search)
        pool._workspace.control[INSIDE] = 1
        pool.finish()
        has_ended.set()

    with SearchPool(1) as pool:
        thread = threading.Thread(target=search_with_a_late_thread)
        thread.start()
        while not pool._workspace.control[INSIDE] or pool._workspace.control[OPENED]:  # until all pieces are done
            time.sleep(0.001)
        was_let_go = has_ended.wait(0.05) or pool._post.held[1] is None
        pool._workspace.control[INSIDE] = 0
        thread.join(WAIT_S)
        assert not was_let_go and has_ended.is_set() and pool._post.held[1] is None


def test_a_team_runs_tapes_while_its_threads_search() -> None:
    search, tape, counts = make_search(big_spec()), Tape(), np.zeros(300, np.int64)
    want = alone(search)
    tape.add(count, words(counts), len(counts))
    with Team(3) as team:
        pool = SearchPool(team)
        for number in range(1, 21):
            pool.start(search)
            team.run(tape)
            assert (counts == number).all()
            pool.finish()
            np.testing.assert_array_equal(search.out.kv_indices, want)
            search.out.kv_indices[:] = -777
        assert len(team.helpers.threads) == 2
        pool.close()
        with pytest.raises(RuntimeError, match="the team is closed"):
            team.run(tape)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not let threads keep to CPUs")
def test_threads_run_only_on_their_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    search = make_search(big_spec())
    want = alone(search)
    with SearchPool(2, cpus=[cpu]) as pool:
        np.testing.assert_array_equal(run(pool, search), want)
        assert os.sched_getaffinity(pool._helpers.threads[0].native_id) == {cpu}
    with pytest.raises(ValueError, match="got 2 CPUs for 1 threads"):
        SearchPool(2, cpus=[cpu, cpu])
    with pytest.raises(ValueError, match="may not use all of the CPUs"):
        SearchPool(2, cpus=[100_000])


def test_an_idle_pool_uses_no_cpu_time_and_wakes_up_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "NAP_MS", 5.0)
    search = make_search(big_spec())
    want = alone(search)
    with SearchPool(3) as pool:
        for _ in range(3):
            np.testing.assert_array_equal(run(pool, search), want)
            wait_until(lambda: pool._helpers.sleepers == 2)
            assert is_idle(window_s=0.2)
            search.out.kv_indices[:] = -777


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from csattn.cpu.tape import Tape
from csattn.cpu.team import Team
from csattn.search import SearchPool
from tests.search.test_pool import alone, big_spec, make_search, run

search = make_search(big_spec())
want = alone(search)
pool = SearchPool(3)
assert (run(pool, search) == want).all()
"""


def run_script(rest: str) -> None:
    code = SCRIPT + textwrap.dedent(rest)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr


def test_the_interpreter_exits_with_an_open_pool_and_an_unfinished_search() -> None:
    run_script("pool.start(search)")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    run_script(
        """
        team = Team(2)
        team.run(Tape())
        pool.start(search)  # the child knows nothing of it
        child = os.fork()
        if child == 0:
            assert (run(pool, search) == want).all() and pool._helpers.threads
            team.run(Tape())
            sys.exit(0)
        pool.finish()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (run(pool, search) == want).all()
        """
    )
