"""Threads for searches. They wait inside a kernel, without the GIL; what a search chooses does not depend on them."""

import os
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.waiting import CLOSED, OPENED, STOPPED
from csattn.index import LayerIndex
from csattn.search.in_turn import DONE, UNSOUND, SearchSeries, run_series
from csattn.search.run import LayerSearch, one_token
from csattn.search.work import CONTROL_WORDS, FAILED, finish, serve
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.sketch.index import SketchIndex
from csattn.table.tail import ListTail

SMALL_WORK_KEYS = 1 << 17  # scored keys, over all query rows: nobody is woken for some tens of microseconds of work
SPIN_MS = 1.0  # how long threads look for the next search without a rest
NAP_MS = 50.0  # how long they look every now and then, before they sleep
NUM_SLOTS = 8  # jobs under way: one thread chooses, which takes as long as all take to score and copy several more


class SearchPool:
    """num_threads threads, the calling one included. Close it, or use it as a context manager.

    `start` hands a search over and returns; `finish` helps with what is left of it and waits for the rest.
    Several threads may use one pool: from its start to its finish, a search has the pool for itself.
    """

    _user: int | None  # the thread whose search is under way
    _number: int  # of the last search
    _crew: "_Crew"

    def __init__(
        self,
        num_threads: int,
        cpus: Sequence[int] | None = None,  # CPUs that the pool's own threads keep to, one each; Linux
    ) -> None:
        assert num_threads >= 1, f"a pool needs at least 1 thread, got {num_threads}"
        if cpus is not None:
            _check_cpus(cpus, num_threads - 1)
        self.num_threads = num_threads
        self._cpus = tuple(cpus) if cpus is not None else None
        self._open()

    def start(self, search: LayerSearch) -> None:
        """Hand the search over to the pool's threads. Until this thread's `finish`, its arrays must be left alone."""
        self._after_fork()
        me = threading.get_ident()
        assert self._user != me, "this thread has started a search already; finish it first"
        self._lock.acquire()
        self._user = me
        try:
            self._crew.require_sound()
            if search.num_scored_keys >= SMALL_WORK_KEYS:
                self._crew.hire(self.num_threads, self._cpus)
            self._crew.search = search
            self._num_open = self._begin(search, 0)
        except BaseException:
            self._release()
            raise

    def finish(self) -> None:
        """Return when the search that this thread has started is done."""
        self._after_fork()
        search = self._crew.search
        assert self._user == threading.get_ident() and search is not None, "this thread has started no search"
        workspace = self._crew.workspace
        try:
            done = 0
            while True:
                if not finish(workspace.calls, workspace.progress, workspace.control, self._num_open):
                    self._crew.require_sound()
                done += self._num_open
                if done == search.num_jobs:
                    break
                self._num_open = self._begin(search, done)
        finally:
            self._release()

    def run_series(self, series: SearchSeries, since: int, give_up: NDArray[np.int64]) -> bool:
        """Run searches as their queries come; False if the word `give_up` [1] was set before the last query came.

        since: what the flags of the series count from.
        """
        self._after_fork()
        me = threading.get_ident()
        assert self._user != me, "this thread has started a search already; finish it first"
        with self._lock:
            crew, workspace = self._crew, self._crew.workspace
            crew.require_sound()
            crew.hire(self.num_threads, self._cpus)  # also for no searches: then nobody waits while it compiles
            series.make_room(workspace)
            crew.wake()
            words = workspace.calls, workspace.progress, workspace.control
            of_searches = series.calls, series.num_jobs, series.query_flags, series.choice_flags
            why, self._number = run_series(*words, *of_searches, since, give_up, self._number)
            if why == UNSOUND:
                crew.require_sound()
            return bool(why == DONE)

    def search(
        self,
        q: NDArray[np.float32],  # [num_q_heads, head_dim]
        index: LayerIndex | SketchIndex,
        tail: ListTail | None,
        top_k: int,
        sink_len: int,
        window_len: int,
        softmax_scale: float,
        out: Selection,  # kv_indices [num_heads, top_k]
    ) -> None:
        """`csattn.search.search`, shared out among the threads."""
        self.search_layers([one_token(q, index, tail, top_k, sink_len, window_len, softmax_scale, out)])

    def search_tokens(
        self,
        q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
        index: LayerIndex | SketchIndex,
        tail: ListTail | None,
        top_k: int,
        sink_len: int,
        window_len: int,
        softmax_scale: float,
    ) -> TokenSelections:
        """`csattn.search.search_tokens`, shared out among the threads."""
        out = empty_token_selections(q.shape[0], index.num_heads, top_k)
        self.search_layers([LayerSearch(q, index, tail, sink_len, window_len, softmax_scale, out)])
        return out

    def search_layers(self, layers: Sequence[LayerSearch]) -> None:
        """Run several searches, over different layers, requests or both; return when all are done."""
        for layer in layers:
            self.start(layer)
            self.finish()

    def close(self) -> None:
        """Let the threads go, for good. What this thread has started and not finished, it gives up."""
        self._after_fork()
        if self._user != threading.get_ident():
            self._lock.acquire()
        self._dismiss()
        self._release()

    def _open(self) -> None:
        """Begin without threads: they come with the first search that is worth it."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._user = None
        self._number, self._num_open = 0, 0
        self._crew = _Crew(SearchWorkspace(self.num_threads, min(NUM_SLOTS, self.num_threads)))
        self._dismiss = weakref.finalize(self, self._crew.dismiss)  # also where close is forgotten, and at exit

    def _after_fork(self) -> None:
        """A forked process has none of the threads, and the lock in whatever state it was."""
        if self._pid != os.getpid():
            self._dismiss.detach()
            self._open()

    def _begin(self, search: LayerSearch, first_job: int) -> int:
        """Hand jobs over from first_job on; how many."""
        self._number += 1
        num_jobs = search.begin_in(self._crew.workspace, first_job, self._number)
        if search.num_scored_keys >= SMALL_WORK_KEYS:
            self._crew.wake()
        return num_jobs

    def _release(self) -> None:
        self._crew.search, self._user = None, None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SearchPool {self.num_threads} threads, {len(self._crew.threads)} of them hired>"


def _check_cpus(cpus: Sequence[int], num_wanted: int) -> None:
    """Raise ValueError if threads cannot keep to these CPUs."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("threads cannot keep to CPUs on this system; leave `cpus` out")
    if len(cpus) != num_wanted:
        raise ValueError(f"got {len(cpus)} CPUs for {num_wanted} threads; name one for each but the calling one")
    if not set(cpus) <= os.sched_getaffinity(0):
        raise ValueError(f"this process may not use all of the CPUs {list(cpus)}; name some it may use")


def _compile_serve() -> None:
    closed = np.ones(CONTROL_WORDS, np.int64)
    serve(closed, closed, closed, 1, 0, 0, 0)


class _Crew:
    """A pool's own threads, and what they share with those who use the pool. Knows no pool: pools may be dropped."""

    def __init__(self, workspace: SearchWorkspace) -> None:
        self.workspace = workspace
        self.search: LayerSearch | None = None  # that is under way: its arrays must live
        self.threads: list[threading.Thread] = []
        self._awake = threading.Condition()
        self._sleepers, self._calls_to_work = 0, 0
        self._pid = os.getpid()
        self._cause: BaseException | None = None

    def require_sound(self) -> None:
        """Raise if a thread has met an error, or all have been let go."""
        if self._cause is not None:
            raise RuntimeError(
                "a thread of the search pool has failed; close the pool and make another"
            ) from self._cause
        if self.workspace.control[STOPPED]:
            raise RuntimeError("the search pool is closed; make another")

    def hire(self, num_threads: int, cpus: tuple[int, ...] | None) -> None:
        """Have all threads but the calling one."""
        if not self.threads:
            _compile_serve()  # here, for a process that forks while another thread compiles passes on a locked compiler
        for number in range(len(self.threads) + 1, num_threads):
            cpu = cpus[number - 1] if cpus is not None else None
            thread = threading.Thread(target=self._run, args=(number, cpu), name=f"search-{number}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def wake(self) -> None:
        """To be called after a search has begun, which a thread that is about to sleep sees, or when one is near."""
        if self._sleepers:
            with self._awake:
                self._calls_to_work += 1
                self._awake.notify_all()

    def dismiss(self) -> None:
        """Let the threads go, as soon as nothing is left to do for them."""
        if self._pid != os.getpid():
            return  # a forked process has no threads to let go, and perhaps a lock that nobody will release
        with self._awake:
            self.workspace.control[STOPPED] = 1
            self._awake.notify_all()
        if threading.current_thread() in self.threads:
            return  # the garbage collector has come by here; the others may wait for what this thread holds
        for thread in self.threads:
            thread.join()

    def _run(self, number: int, cpu: int | None) -> None:
        """What a thread does: work while there is some, sleep otherwise."""
        shared = self.workspace.calls, self.workspace.progress, self.workspace.control
        last_number = 0
        try:
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            while True:
                why, last_number = serve(*shared, number, int(SPIN_MS * 1e6), int(NAP_MS * 1e6), last_number)
                if why == CLOSED:
                    return
                self._sleep(last_number)
        except BaseException as error:
            self._cause = error
            self.workspace.control[FAILED] = 1

    def _sleep(self, last_number: int) -> None:
        """Until there is a search that this thread has not seen, or will be one, or the pool is closed."""
        control = self.workspace.control
        with self._awake:
            self._sleepers += 1
            heard = self._calls_to_work
            while not control[STOPPED] and control[OPENED] in (0, last_number) and self._calls_to_work == heard:
                self._awake.wait()
            self._sleepers -= 1
