"""Threads that wait inside a kernel, without the GIL, for work that is opened at their posts: tapes and searches."""

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, aligned, compiled_address
from csattn.cpu.posts import (
    CLOSED,
    FAILED,
    MAX_POSTS,
    NUM_POST_WORDS,
    OPENED,
    STOPPED,
    TABLE_WORDS,
    list_post,
    poll_for_work,
)
from csattn.cpu.tape import MAX_STAGES, SHARED_WORDS, Tape, finish_run, help_run, open_run, run_at_once

SPIN_MS = 1.0  # how long idle threads poll continuously
NAP_MS = 50.0  # idle time after which they sleep; until then they poll now and then


@dataclass(slots=True)
class Post:
    """A kind of work that threads help with: see `csattn.cpu.posts`."""

    words: NDArray[np.int64]
    stage: Stage
    argument: NDArray[np.int64]  # contiguous: the stage gets its address and the thread's number
    held: Any = None  # kept alive as well, for threads that may be reading it


class Team:
    """num_threads threads, the calling one included. Close it, or use it as a context manager.

    Runs tapes, for one calling thread at a time; others may meanwhile open work at their own posts (`HelperThreads`).
    """

    _helpers: "HelperThreads"
    _tapes: Post | None
    _number: int  # of the last run

    def __init__(
        self,
        num_threads: int,
        cpus: Sequence[int] | None = None,  # pin the team's own threads to these CPUs, one each; Linux only
        name: str = "team",  # for error messages
    ) -> None:
        assert num_threads >= 1, f"a {name} needs at least 1 thread, got {num_threads}"
        if cpus is not None:
            _check_cpus(cpus, num_threads - 1)
        self.num_threads, self._name = num_threads, name
        self._cpus = tuple(cpus) if cpus is not None else None
        self._open()

    @property
    def helpers(self) -> "HelperThreads":
        """The team's own threads. A forked process has none of them, and gets new ones without posts."""
        if self._helpers.pid != os.getpid():
            self._finalizer.detach()
            self._open()
        return self._helpers

    def run(self, tape: Tape) -> None:
        """Run all stages of the tape; return when they are done.

        Raises RuntimeError if the team is closed or a thread has failed.
        """
        stages = tape.stages
        assert len(stages) <= MAX_STAGES, f"a tape of {len(stages)} stages is longer than {MAX_STAGES}"
        helpers = self.helpers
        helpers.require_running()
        if self._tapes is None:
            shared = aligned(8 * SHARED_WORDS).view(np.int64)
            self._tapes = helpers.add_post(Post(shared, help_run, shared))
        helpers.start()
        self._number += 1
        shared, address = self._tapes.words, stages.ctypes.data
        if helpers.sleepers:  # a thread that falls asleep right now misses this run only
            open_run(stages, shared, address, self._number)
            helpers.wake()
            succeeded = finish_run(shared)
        else:
            succeeded = run_at_once(stages, shared, address, self._number)
        if not succeeded:
            helpers.require_running()

    def close(self) -> None:
        """End the threads, for good."""
        self.helpers.stop()

    def _open(self) -> None:
        """Start without threads: they are started for the first work that needs them (`HelperThreads.start`)."""
        self._helpers = HelperThreads(self.num_threads, self._cpus, self._name)
        self._tapes, self._number = None, 0
        self._finalizer = weakref.finalize(self, self._helpers.stop)  # also if close is forgotten, and at exit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Team {self.num_threads} threads, {len(self._helpers.threads)} of them hired>"


class HelperThreads:
    """A team's own threads, and the posts at which they get work.

    Has no reference to the team, so that the team can be garbage-collected.
    """

    def __init__(self, num_threads: int, cpus: tuple[int, ...] | None, name: str) -> None:
        self.pid = os.getpid()
        self.threads: list[threading.Thread] = []
        self.sleepers = 0
        self._num_threads, self._cpus, self._name = num_threads, cpus, name
        self._posts: list[Post] = []
        self._table = np.zeros(TABLE_WORDS, np.int64)
        self._num_listed = 0  # posts in the table
        self._awake = threading.Condition()
        self._num_wakes = 0
        self._cause: BaseException | None = None

    def add_post(self, post: Post) -> Post:
        """Have threads poll this post, from the next `start` on."""
        with self._awake:
            assert len(self._posts) < MAX_POSTS
            post.words[:NUM_POST_WORDS] = 0
            self._posts.append(post)
        return post

    def require_running(self) -> None:
        """Raise RuntimeError if a thread has failed or the threads have been stopped."""
        if self._cause is not None:
            raise RuntimeError(
                f"a thread of the {self._name} has failed; close the {self._name} and make another"
            ) from self._cause
        if self._table[STOPPED]:
            raise RuntimeError(f"the {self._name} is closed; make another")

    def start(self) -> None:
        """Start all threads but the calling one, unless they run, and list all posts in their table."""
        if len(self.threads) == self._num_threads - 1 and (self._num_listed == len(self._posts) or not self.threads):
            return
        with self._awake:
            if not self.threads:
                # compile it here: a process that forks while another thread compiles passes on a locked compiler
                poll_for_work(np.ones(TABLE_WORDS, np.int64), np.zeros(MAX_POSTS, np.int64), 0, 0, 0)
            for number in range(self._num_listed, len(self._posts)):
                post = self._posts[number]
                words, argument = post.words.ctypes.data, post.argument.ctypes.data
                list_post(self._table, number, words, compiled_address(post.stage), argument)
            self._num_listed = len(self._posts)
            for number in range(len(self.threads) + 1, self._num_threads):
                cpu = self._cpus[number - 1] if self._cpus is not None else None
                name = f"{self._name}-{number}"
                thread = threading.Thread(target=self._run, args=(number, cpu), name=name, daemon=True)
                thread.start()  # may fail; one that has not started cannot be joined
                self.threads.append(thread)

    def wake(self) -> None:
        """Wake sleeping threads. Call it after opening work, or shortly before.

        A thread that is about to sleep sees opened work by itself.
        """
        if self.sleepers:
            with self._awake:
                self._num_wakes += 1
                self._awake.notify_all()

    def stop(self) -> None:
        """End the threads as soon as they have nothing left to do."""
        if self.pid != os.getpid():
            return  # a forked process has no threads to end, and perhaps a lock that will never be released
        with self._awake:
            self._table[STOPPED] = 1
            self._awake.notify_all()
        if threading.current_thread() in self.threads:
            return  # called by the garbage collector in this thread; other threads may wait for what it holds
        for thread in self.threads:
            thread.join()

    def _run(self, number: int, cpu: int | None) -> None:
        """The main loop of a thread: work while there is some, sleep otherwise."""
        seen = np.zeros(MAX_POSTS, np.int64)
        try:
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})
            while poll_for_work(self._table, seen, number, int(SPIN_MS * 1e6), int(NAP_MS * 1e6)) != CLOSED:
                self._sleep(seen)
        except BaseException as error:
            self._cause = error
            for post in self._posts:
                post.words[FAILED] = 1

    def _sleep(self, seen: NDArray[np.int64]) -> None:
        """Sleep until there is work that this thread has not seen, or until it is woken, or the threads are stopped."""
        with self._awake:
            self.sleepers += 1
            num_wakes = self._num_wakes
            while not (self._table[STOPPED] or self._num_wakes != num_wakes or self._anything_new(seen)):
                self._awake.wait()
            self.sleepers -= 1

    def _anything_new(self, seen: NDArray[np.int64]) -> bool:
        """Whether a listed post has work that this thread has not seen."""
        listed = self._posts[: self._num_listed]
        return any(post.words[OPENED] not in (0, seen[number]) for number, post in enumerate(listed))


def _check_cpus(cpus: Sequence[int], num_wanted: int) -> None:
    """Raise ValueError if threads cannot be pinned to these CPUs."""
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("threads cannot be bound to CPUs on this system; leave `cpus` out")
    if len(cpus) != num_wanted:
        raise ValueError(
            f"got {len(cpus)} CPUs for {num_wanted} threads; name one for each thread except the calling one"
        )
    if not set(cpus) <= os.sched_getaffinity(0):
        raise ValueError(f"this process may not use all of the CPUs {list(cpus)}; name some it may use")
