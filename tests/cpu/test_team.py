"""A team runs every piece of a tape once and in stage order, with any number of threads, which end with it."""

import threading
import time

import numpy as np
import pytest

from csattn.cpu import team as teams
from csattn.cpu.addresses import array_at
from csattn.cpu.atomics import load_acquire
from csattn.cpu.posts import LINE, OPENED
from csattn.cpu.tape import COUNTERS, SHARED_WORDS, Tape
from csattn.cpu.team import Team
from csattn.cpu.waiting import yield_core


def count(arguments: int, piece: int, thread: int, unused: int) -> int:
    """counts[piece] += 1"""
    args = array_at(arguments, 2, np.int64(0))
    array_at(args[0], args[1], np.int64(0))[piece] += 1
    return 0


def _total(arguments: int, piece: int, thread: int, unused: int) -> int:
    """totals[piece] = the sum of all counts, computed slowly: a thread that does not wait is likely to see less."""
    args = array_at(arguments, 4, np.int64(0))
    counts, totals = array_at(args[0], args[1], np.int64(0)), array_at(args[2], args[3], np.int64(0))
    total = 0
    for i in range(len(counts) - 1, -1, -1):
        total += counts[i]
    totals[piece] = total
    return 0


def hold(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Wait until some thread has taken a piece of the next stage."""
    args = array_at(arguments, 2, np.int64(0))
    shared = array_at(args[0], args[1], np.int64(0))
    while load_acquire(shared, COUNTERS + LINE) == 0:
        yield_core()
    return 0


def words(*arrays: np.ndarray) -> np.ndarray:
    return np.array([word for array in arrays for word in (array.ctypes.data, len(array))], np.int64)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_every_piece_runs_once_and_stages_run_in_order(num_threads: int) -> None:
    tape, counts, totals = Tape(), [np.zeros(n, np.int64) for n in (1, 7, 500)], []
    for counted in counts:
        totals.append(np.zeros(5, np.int64))
        tape.add(count, words(counted), len(counted))
        tape.add(_total, words(counted, totals[-1]), 5)
    with Team(num_threads) as team:
        for run in range(1, 301):
            team.run(tape)
            assert all((counted == run).all() for counted in counts)
            assert all((total == run * len(counted)).all() for total, counted in zip(totals, counts, strict=True))


def test_the_number_of_pieces_can_change_between_runs(rng: np.random.Generator) -> None:
    tape, counts = Tape(), np.zeros(64, np.int64)
    tape.add(count, words(counts), 0)
    tape.add(count, words(counts), 0, waits=False)
    want = np.zeros(64, np.int64)
    with Team(3) as team:
        for first, second in rng.integers(0, 65, (500, 2)):
            tape.pieces[:] = first, 0
            team.run(tape)
            tape.pieces[:] = 0, second
            team.run(tape)
            want[:first] += 1
            want[:second] += 1
            np.testing.assert_array_equal(counts, want)


def test_threads_sleep_when_idle_wake_for_runs_and_end_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "SPIN_MS", 0.1)
    monkeypatch.setattr(teams, "NAP_MS", 1.0)
    tape, counts = Tape(), np.zeros(1000, np.int64)
    tape.add(count, words(counts), 1000)
    before = threading.active_count()
    team = Team(3)
    assert threading.active_count() == before
    for run in range(1, 6):
        team.run(tape)
        deadline = time.monotonic() + 20
        while team.helpers.sleepers < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert team.helpers.sleepers == 2
        assert (counts == run).all()
    team.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        team.run(tape)
    team.close()


def test_a_thread_that_does_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    counted, tape = np.zeros(7, np.int64), Tape()
    tape.add(count, words(counted), len(counted))
    closed, used = Team(3), Team(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for team in (closed, used):
            with pytest.raises(RuntimeError, match="can't start"):
                team.run(tape)
    closed.close()
    with used as team:
        team.run(tape)
        assert (counted == 1).all() and "2 of them hired" in repr(team)


def test_a_failing_thread_makes_runs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("not a byte left")

    monkeypatch.setattr(teams, "poll_for_work", fail)
    tape, counts = Tape(), np.zeros(10, np.int64)
    tape.add(count, words(counts), 10)
    with Team(2) as team:
        team.helpers.start()
        for thread in team.helpers.threads:
            thread.join()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a thread of the team has failed") as caught:
                team.run(tape)
            assert isinstance(caught.value.__cause__, MemoryError)


def test_a_thread_that_fails_while_holding_a_piece_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()

    def take_and_fail(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        while not shared[OPENED]:
            time.sleep(0.001)
        shared[COUNTERS + LINE] += 1  # take a piece of the second stage, which waits for the first
        taken.set()
        time.sleep(0.05)
        raise MemoryError("not a byte left")

    monkeypatch.setattr(teams, "aligned", lambda num_bytes: shared.view(np.uint8)[:num_bytes])
    monkeypatch.setattr(teams, "poll_for_work", take_and_fail)
    shared, tape, counts = np.zeros(SHARED_WORDS, np.int64), Tape(), np.zeros(10, np.int64)
    tape.add(hold, words(shared), 1)
    tape.add(count, words(counts), 10)
    with Team(2) as team, pytest.raises(RuntimeError, match="a thread of the team has failed"):
        team.run(tape)
    assert taken.is_set()


def test_threads_end_when_their_team_is_garbage_collected() -> None:
    tape, counts = Tape(), np.zeros(10, np.int64)
    tape.add(count, words(counts), 10)
    before = threading.active_count()
    team = Team(2)
    team.run(tape)
    assert threading.active_count() == before + 1
    del team
    assert threading.active_count() == before
