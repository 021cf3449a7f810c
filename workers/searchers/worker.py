"""A search worker: runs one client's searches, in its own process, until either of the two ends."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact, open_artifact
from csattn.search import SearchPool
from offload.shared_memory import map_memory
from workers.searchers.mail import ATTACH, COUNT, DONE, FAILED, KIND, LOAD, REPLY_BYTES, STEP, STEPS, WAKE_UP, Mail
from workers.searchers.rendezvous import connect
from workers.searchers.step_searches import StepSearches
from workers.searchers.words import compile_words


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker's parameters: a few plain values, which any launcher can pass on."""

    number: int
    address: str  # where the client listens for it, on the same machine
    num_threads: int = 1
    cpus: tuple[int, ...] | None = None  # a CPU for each thread to be pinned to; Linux only
    spin_us: float = 0.0  # how long it spins for the next request before it sleeps


class SearchWorker:
    """Opens the artifacts that its client names, read-only, and searches them. It has no state of any request.

    `serve` blocks until the client has gone. The host (a child process, an actor) calls it once and ends its process
    when it returns. The host must not restart the worker: the client notices the end at once, and launches a new one.
    """

    _connection: socket.socket  # these two from `serve` on
    _searches: StepSearches

    def __init__(self, spec: WorkerSpec, open_context: Callable[[Path], Artifact] = open_artifact) -> None:
        self.spec, self._open_context = spec, open_context
        self._mail: Mail | None = None
        self._step_memory: NDArray[np.uint8] | None = None  # received, but not attached yet
        self._artifacts: dict[int, Artifact] = {}
        self._num_answers = 0

    def serve(self, watch: Callable[[socket.socket], object] | None = None) -> None:
        """Answer requests until the client goes. Raises OSError if no client listens at the address.

        Within a step the worker watches only memory, so it does not notice that its client was killed. watch: is given
        the connection before the first request, so that the host can end the process in that case.
        """
        cpus = self.spec.cpus
        if cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus[:1])  # of the calling thread
        compile_words()
        own_cpus = cpus[1:] if cpus is not None else None
        self._searches = StepSearches(SearchPool(self.spec.num_threads, own_cpus))
        self._connection = connect(self.spec.address)
        if watch is not None:
            watch(self._connection)
        try:
            while self._await_request(self._num_answers + 1):
                self._answer()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has gone
        finally:
            self._connection.close()
            self._searches.close()

    def _await_request(self, number: int) -> bool:
        """Wait for the request of this number; false if none will come."""
        spin_ns = int(self.spec.spin_us * 1e3)
        while self._mail is None or not self._mail.await_request(number, spin_ns):
            if not self._listen():
                return False
        return True

    def _listen(self) -> bool:
        """Sleep until the client sends something, and take new memory that comes with it; false if it has gone."""
        data, fds, _, _ = socket.recv_fds(self._connection, 64, 4)
        for fd in fds:
            memory = map_memory(fd)
            os.close(fd)
            if STEPS in data:
                self._step_memory = memory
            else:
                self._mail = Mail(memory)
        return data != b""

    def _answer(self) -> None:
        assert self._mail is not None, "a request has come through it"
        mail, status, since_ns = self._mail, DONE, time.perf_counter_ns()
        try:
            self._execute(mail)
        except Exception as error:  # reported to the client, which decides what to do
            mail.write_text(f"{type(error).__name__}: {error}", REPLY_BYTES)
            status = FAILED
        self._num_answers += 1
        if mail.post_answer(self._num_answers, status, time.perf_counter_ns() - since_ns):
            self._connection.send(WAKE_UP)

    def _execute(self, mail: Mail) -> None:
        kind = int(mail.words[KIND])
        if kind == STEP:
            plan, records, layer_idx, since = mail.read_step()
            if records is not None:
                self._searches.keep(plan, records)
            self._searches.run(plan, layer_idx, since)
            return
        if kind == ATTACH:
            self._searches.attach(self._await_memory())
            return
        number, _, path = mail.read_text(COUNT).partition(" ")
        context_id = int(number)
        self._searches.unload(context_id)
        if (old := self._artifacts.pop(context_id, None)) is not None:
            old.close()
        if kind == LOAD:
            artifact = self._open_context(Path(path))
            self._searches.load(context_id, artifact)
            self._artifacts[context_id] = artifact

    def _await_memory(self) -> NDArray[np.uint8]:
        """Return the new step memory, waiting for it if it has not been received with the request."""
        while self._step_memory is None:
            if not self._listen():
                raise ConnectionResetError("the client has gone")
        memory, self._step_memory = self._step_memory, None
        return memory


def choose_cpus(num_wanted: int) -> tuple[int, ...] | None:
    """Choose CPUs for workers' threads: the last ones available, if as many remain for others. None: too few."""
    available: Sequence[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    return tuple(available[-num_wanted:]) if len(available) >= 2 * num_wanted else None
