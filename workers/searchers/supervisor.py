"""Keeps one worker running: starts it, loads its contexts, watches it, and restarts it when it is lost."""

import contextlib
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from csattn.errors import SearchLostError
from offload.shared_memory import SharedMemory
from workers.searchers.channel import Channel, await_answers
from workers.searchers.mail import ATTACH, LOAD, UNLOAD
from workers.searchers.rendezvous import Rendezvous
from workers.searchers.worker import WorkerSpec

START_S = 60.0  # how long a worker may take to come up
LOAD_S = 600.0  # how long a worker may take to read a context's index
CALM_S = 5.0  # a worker that lived shorter is restarted with exponential backoff
LEAST_DELAY_S, MOST_DELAY_S = 0.05, 5.0


class WorkerHandle(Protocol):
    """A worker that was launched, as a child process or in some other way."""

    def fault(self) -> str | None:
        """Why the worker will not come up any more; None if no reason is known."""
        ...

    def kill(self) -> None:
        """End the worker for certain, whatever its state; it may be gone already."""
        ...


Launch = Callable[[WorkerSpec], WorkerHandle]  # starts SearchWorker(spec).serve() somewhere; returns at once


@dataclass(slots=True)
class Contexts:
    """The contexts that every worker has to load, and the step memory, if any, that it has to map."""

    paths: dict[int, Path] = field(default_factory=dict)
    step_memory: SharedMemory | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while these, or what workers have, change


class Supervisor:
    """Keeps one worker running, in a thread. `channel` is the connection to it, None while it is away."""

    def __init__(
        self, launch: Launch, make_spec: Callable[[str], WorkerSpec], spin_ns: int, contexts: Contexts
    ) -> None:
        self.channel: Channel | None = None
        self.handle: WorkerHandle | None = None  # of the latest worker
        self.came_up = threading.Event()  # set once the first worker has come up or failed to
        self.fault = ""  # the last error
        self.num_losses = 0
        self._launch, self._make_spec, self._spin_ns, self._contexts = launch, make_spec, spin_ns, contexts
        self._coming: Channel | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="search-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the worker and the thread that watches it."""
        self._closing.set()
        for channel in (self.channel, self._coming):
            if channel is not None:
                channel.mark_lost()
        self._thread.join()

    def _run(self) -> None:
        delay_s = LEAST_DELAY_S
        while not self._closing.is_set():
            since = time.monotonic()
            try:
                self._keep_one()
            except Exception as error:  # launchers may raise anything
                self.fault = f"{type(error).__name__}: {error}"
            finally:
                self.channel = self._coming = None
                self.came_up.set()
            delay_s = LEAST_DELAY_S if time.monotonic() - since > CALM_S else min(2 * delay_s, MOST_DELAY_S)
            self._closing.wait(delay_s)

    def _keep_one(self) -> None:
        """Start a worker, load its contexts, and wait for its end."""
        with contextlib.closing(Rendezvous()) as rendezvous:
            handle = self.handle = self._launch(self._make_spec(rendezvous.address))
            try:
                closed = "the search workers are being closed"
                connection = rendezvous.accept(START_S, lambda: closed if self._closing.is_set() else handle.fault())
            except BaseException:
                handle.kill()
                raise
        try:
            channel = self._coming = Channel(connection, self._spin_ns)
            if self._closing.is_set():  # `close` may have looked before the channel was there
                channel.mark_lost()
            self._load(channel)
            self.came_up.set()
            _await_end(channel)
            self.num_losses += not self._closing.is_set()
        finally:
            self.channel = None
            handle.kill()

    def _load(self, channel: Channel) -> None:
        """Bring the worker up to date, and publish its channel once it has all contexts and the step memory."""
        loaded: dict[int, Path] = {}
        attached = None
        while True:
            with self._contexts.lock:
                wanted, memory = dict(self._contexts.paths), self._contexts.step_memory
                if loaded == wanted and attached is memory:
                    self.channel = channel
                    return
            wants_memory = memory is not None and memory is not attached and memory.is_open
            if wants_memory and (failure := broadcast([channel], ATTACH, memory=memory)):
                raise SearchLostError(f"a search worker cannot map the memory of steps: {failure}; free memory")
            attached = memory
            for context_id in loaded.keys() - wanted.keys():
                broadcast([channel], UNLOAD, str(context_id))
            for context_id, path in wanted.items() - loaded.items():
                if failure := broadcast([channel], LOAD, f"{context_id} {path}"):
                    self.fault = failure  # the client searches what this worker cannot
            if channel.lost:
                raise SearchLostError("a search worker was lost while it loaded its contexts; it is started again")
            loaded = wanted


def broadcast(
    channels: list[Channel],
    kind: int,
    text: str = "",
    memory: SharedMemory | None = None,
    patience_s: float = LOAD_S,  # a worker that has not answered by then is lost
) -> str | None:
    """Have the workers, in parallel, load a context, unload one, or map the step memory.

    Returns the error of one of them, if any.
    """
    fd = None if memory is None else memory.fd
    await_answers([channel for channel in channels if channel.send_request(kind, text, fd)], patience_s)
    failures = [channel.mail.failure for channel in channels if not channel.lost]
    return next((failure for failure in failures if failure), None)


def _await_end(channel: Channel) -> None:
    """Wait until the worker has gone or is given up."""
    poller = select.poll()
    poller.register(channel.connection, 0)  # only events that mean the connection is closed, on either side
    while not channel.lost:
        if poller.poll(1000):
            with contextlib.suppress(OSError):
                channel.mark_lost()
