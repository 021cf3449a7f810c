"""Searches divided among the threads of a team. What is chosen does not depend on the number of threads."""

import threading
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.posts import await_others
from csattn.cpu.team import HelperThreads, Post, Team
from csattn.search.run import LayerSearch
from csattn.search.series import DONE, FAILED, SearchSeries, run_series
from csattn.search.work import finish, help_search
from csattn.search.workspace import SearchWorkspace

SMALL_WORK_KEYS = 1 << 17  # scored keys over all query rows, some tens of microseconds: for less, no thread is woken
NUM_SLOTS = 8  # jobs in flight: one thread chooses for a job while all of them score and copy several more


class SearchPool:
    """A pool of num_threads threads, the calling one included. Close it, or use it as a context manager.

    `start` hands a search to the threads and returns; `finish` helps with what is left of it and waits for its end.
    Several threads may use one pool: from `start` to `finish`, a search has it to itself.
    """

    _helpers: HelperThreads
    _post: Post  # holds the workspace and the running search: their arrays must live while threads may read them
    _workspace: SearchWorkspace
    _user: int | None  # id of the thread whose search is running
    _number: int  # of the last search

    def __init__(
        self,
        threads: int | Team,  # how many; or a team, whose threads then run its tapes and searches. The pool closes it
        cpus: Sequence[int] | None = None,  # of the `Team` that the pool makes if it is given none
    ) -> None:
        self._team = threads if isinstance(threads, Team) else Team(threads, cpus, "search pool")
        self.num_threads = self._team.num_threads
        self._open()

    def start(self, search: LayerSearch) -> None:
        """Hand the search to the pool's threads. Its arrays must not be touched until this thread's `finish`."""
        self._acquire()
        try:
            self._helpers.require_running()
            if search.num_scored_keys >= SMALL_WORK_KEYS:
                self._helpers.start()
            self._post.held = self._workspace, search
            self._num_open = self._begin(search, 0)
        except BaseException:
            self._release()
            raise

    def finish(self) -> None:
        """Help with the search that this thread has started, and return when it is done."""
        self._after_fork()
        workspace, search = self._post.held
        assert self._user == threading.get_ident() and search is not None, "this thread has started no search"
        try:
            done = 0
            while True:
                if not finish(workspace.calls, workspace.progress, workspace.control, self._num_open):
                    self._helpers.require_running()
                done += self._num_open
                if done == search.num_jobs:
                    break
                self._num_open = self._begin(search, done)
        finally:
            self._release()

    def run_series(self, series: SearchSeries, since: int, give_up: NDArray[np.int64]) -> bool:
        """Run searches as their queries arrive; return False if the word `give_up` [1] was set before the last arrived.

        since: what the values of the series' flags are relative to.
        """
        self._acquire()
        try:
            helpers, workspace = self._helpers, self._workspace
            helpers.require_running()
            helpers.start()  # also for an empty series, which compiles everything before anybody waits for it
            if series.searches:
                workspace.prepare(*series.room)
            helpers.wake()
            words = workspace.calls, workspace.progress, workspace.control
            of_searches = series.calls, series.num_jobs, series.query_flags, series.choice_flags
            why, self._number = run_series(*words, *of_searches, since, give_up, self._number)
            if why == FAILED:
                helpers.require_running()
            return bool(why == DONE)
        finally:
            self._release()

    def search_layers(self, searches: Sequence[LayerSearch]) -> None:
        """Run searches one after another, over different layers, requests or both; return when all are done."""
        for search in searches:
            self.start(search)
            self.finish()

    def close(self) -> None:
        """Stop the threads for good. A search that this thread has started and not finished is abandoned."""
        self._after_fork()
        if self._user != threading.get_ident():
            self._lock.acquire()
        self._team.close()
        self._release()

    def _open(self) -> None:
        self._helpers = self._team.helpers
        self._lock = threading.Lock()
        self._user = None
        self._number, self._num_open = 0, 0
        workspace = self._workspace = SearchWorkspace(self.num_threads, min(NUM_SLOTS, self.num_threads))
        shared = workspace.calls, workspace.progress, workspace.control
        addresses = np.array([words.ctypes.data for words in shared], np.int64)
        self._post = self._helpers.add_post(Post(workspace.control, help_search, addresses, (workspace, None)))

    def _after_fork(self) -> None:
        """In a forked process, start anew: it has other threads, and the lock is in an unknown state."""
        if self._helpers is not self._team.helpers:
            self._open()

    def _acquire(self) -> None:
        self._after_fork()
        me = threading.get_ident()
        assert self._user != me, "this thread has started a search already; finish it first"
        self._lock.acquire()
        self._user = me

    def _begin(self, search: LayerSearch, first_job: int) -> int:
        """Hand over jobs from first_job on; return how many."""
        self._number += 1
        num_jobs = search.begin_in(self._workspace, first_job, self._number)
        if search.num_scored_keys >= SMALL_WORK_KEYS:
            self._helpers.wake()
        return num_jobs

    def _release(self) -> None:
        """Let go of the search, once the threads that found no more work have stopped reading its record."""
        await_others(self._workspace.control)
        self._post.held, self._user = (self._workspace, None), None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
