"""A series of searches without Python in between: each begins when its query arrives and signals when it has chosen."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from csattn.search import LayerSearch, SearchPool, SearchSeries
from tests.search.synthetic import make_queries
from tests.search.test_pool import WAIT_S, alone, big_spec, make_search

SINCE = 1000


class Line:
    """A series of searches over contexts of several lengths, and the words in memory that a device would write."""

    def __init__(self, num_searches: int = 4) -> None:
        self.specs = [big_spec(seed=i, context_len=9000 + 30_000 * (i % 2)) for i in range(num_searches)]
        self.searches = [make_search(spec) for spec in self.specs]
        self.arrived, self.chosen = (np.zeros(num_searches, np.int64) for _ in range(2))
        self.give_up = np.zeros(1, np.int64)

    @property
    def series(self) -> SearchSeries:
        arrived = [(self.arrived[i:].ctypes.data, i) for i in range(len(self.searches))]
        chosen = [(self.chosen[i:].ctypes.data, i, 1) for i in range(len(self.searches))]
        return SearchSeries(self.searches, arrived, chosen)

    def send(self, i: int, value: int = SINCE) -> LayerSearch:
        """Give search `i` a new query and signal its arrival."""
        self.searches[i].q[:] = make_queries(self.specs[i], 2, seed=100 + i)
        self.arrived[i] = value + i
        return self.searches[i]


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_search_begins_when_its_query_arrives_and_signals_when_it_has_chosen(num_threads: int) -> None:
    line, ended = Line(), []
    with SearchPool(num_threads) as pool:
        thread = threading.Thread(target=lambda: ended.append(pool.run_series(line.series, SINCE, line.give_up)))
        thread.start()
        for i in range(len(line.searches)):
            line.arrived[i] = SINCE + i - 1  # left by an earlier run
            search = line.send(i)
            wait_until(lambda i=i: line.chosen[i] == SINCE + i)
            got = search.out.kv_indices.copy()
            np.testing.assert_array_equal(got, alone(search))
            assert (line.chosen[i + 1 :] == 0).all()
        thread.join(WAIT_S)
    assert ended == [True]


def test_a_series_ends_when_it_is_given_up_and_the_pool_stays_usable() -> None:
    line, ended = Line(), []
    with SearchPool(2) as pool:
        thread = threading.Thread(target=lambda: ended.append(pool.run_series(line.series, SINCE, line.give_up)))
        thread.start()
        line.send(0)
        wait_until(lambda: line.chosen[0])
        line.give_up[0] = 1
        thread.join(WAIT_S)
        assert ended == [False] and not line.chosen[1:].any()
        line.give_up[0] = 0
        for i in range(len(line.searches)):
            line.send(i, 2 * SINCE)
        assert pool.run_series(line.series, 2 * SINCE, line.give_up)
        assert line.chosen.tolist() == [2 * SINCE + i for i in range(len(line.searches))]


def test_searches_whose_choice_is_already_made_are_skipped() -> None:
    line = Line()
    for i in (0, 2):
        line.chosen[i] = SINCE + i  # chosen already: its query may have been overwritten since
    with SearchPool(2) as pool:
        for i in (1, 3):
            line.send(i)
        before = [line.searches[i].out.kv_indices.copy() for i in (0, 2)]
        assert pool.run_series(line.series, SINCE, line.give_up)
    for i, kept in zip((0, 2), before, strict=True):
        np.testing.assert_array_equal(line.searches[i].out.kv_indices, kept)
    for i in (1, 3):
        got = line.searches[i].out.kv_indices.copy()
        np.testing.assert_array_equal(got, alone(line.searches[i]))


def test_sleeping_threads_are_woken_for_a_series() -> None:
    line = Line(1)
    with SearchPool(3) as pool:
        for since in (SINCE, 2 * SINCE):
            line.send(0, since)
            assert pool.run_series(line.series, since, line.give_up)
            wait_until(lambda: pool._helpers.sleepers == 2)


def test_an_empty_series_succeeds() -> None:
    with SearchPool(2) as pool:
        assert pool.run_series(SearchSeries([], [], []), SINCE, np.zeros(1, np.int64))


def test_a_closed_pool_refuses_a_series() -> None:
    line = Line(1)
    pool = SearchPool(2)
    pool.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        pool.run_series(line.series, SINCE, line.give_up)
