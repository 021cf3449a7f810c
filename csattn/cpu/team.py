"""Threads that run tapes. They wait inside a kernel, without the GIL; what a tape computes does not depend on them."""

import os
import threading
import weakref
from types import TracebackType
from typing import Self

import numpy as np

from csattn.cpu.tape import COUNTERS, Tape, finish_run, open_run, run_at_once, serve
from csattn.cpu.waiting import CLOSED, LINE, OPENED, STOPPED

SPIN_MS = 0.5  # how long threads look for the next run without a rest
NAP_MS = 50.0  # how long they look every now and then, before they sleep
MAX_STAGES = 4096  # of a tape


class Team:
    """num_threads threads, the calling one included; used by one thread at a time. Close it, or use it as a context
    manager. A forked process needs a team of its own."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1, f"a team needs at least 1 thread, got {num_threads}"
        self.num_threads = num_threads
        self._crew = _Crew(num_threads)
        self._number = 0
        self._pid = os.getpid()
        self._dismiss = weakref.finalize(self, self._crew.dismiss)  # also where close is forgotten, and at exit

    def run(self, tape: Tape) -> None:
        """Do all of the tape's stages; return when they are done."""
        assert self._pid == os.getpid(), "a team's threads stay behind when a process forks; make another team"
        if self._crew.shared[STOPPED]:
            raise RuntimeError("the team is closed; make another")
        stages = tape.stages
        assert len(stages) <= MAX_STAGES, f"a tape of {len(stages)} stages is longer than {MAX_STAGES}"
        self._number += 1
        self._crew.hire()
        shared, address = self._crew.shared, stages.ctypes.data
        if self._crew.anyone_asleep:
            open_run(stages, shared, address, self._number)
            self._crew.wake()
            finish_run(shared)
        else:
            run_at_once(stages, shared, address, self._number)

    def close(self) -> None:
        """Let the threads go, for good."""
        self._dismiss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Team {self.num_threads} threads>"


class _Crew:
    """A team's own threads, and what they share with who uses the team. Knows no team: teams may be dropped."""

    def __init__(self, num_threads: int) -> None:
        words = np.zeros(COUNTERS + (MAX_STAGES + 1) * LINE, np.int64)
        self._words = words
        start = (-words.ctypes.data % 64) // 8
        self.shared = words[start : start + COUNTERS + MAX_STAGES * LINE]
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._awake = threading.Condition()
        self._sleepers = 0
        self._pid = os.getpid()

    def hire(self) -> None:
        """Have all threads but the calling one."""
        while len(self._threads) < self._num_threads - 1:
            number = len(self._threads) + 1
            thread = threading.Thread(target=self._run, args=(number,), name=f"team-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def anyone_asleep(self) -> bool:
        """A thread that falls asleep just now is missed by one run, no more."""
        return self._sleepers > 0

    def wake(self) -> None:
        """To be called after a run has been opened."""
        with self._awake:
            self._awake.notify_all()

    def dismiss(self) -> None:
        """Let the threads go, as soon as nothing is left to do for them."""
        if self._pid != os.getpid():
            return  # a forked process has no threads to let go
        with self._awake:
            self.shared[STOPPED] = 1
            self._awake.notify_all()
        if threading.current_thread() in self._threads:
            return  # the garbage collector has come by here
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        """What a thread does: work while there is some, sleep otherwise."""
        last_number = 0
        while True:
            why, last_number = serve(self.shared, number, int(SPIN_MS * 1e6), int(NAP_MS * 1e6), last_number)
            if why == CLOSED:
                return
            with self._awake:
                self._sleepers += 1
                while not self.shared[STOPPED] and self.shared[OPENED] in (0, last_number):
                    self._awake.wait()
                self._sleepers -= 1
