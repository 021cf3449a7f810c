"""Keeps one worker running: starts it, loads what it has to know, watches it, and starts another when it is lost."""

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

START_S = 60.0  # for a worker to come up
LOAD_S = 600.0  # for a worker to read a context's index
CALM_S = 5.0  # a worker that lived shorter is started again later and later
LEAST_DELAY_S, MOST_DELAY_S = 0.05, 5.0


class WorkerHandle(Protocol):
    """A worker that was started, in whatever way."""

    def fault(self) -> str | None:
        """Why it will not come up any more, as far as is known."""
        ...

    def kill(self) -> None:
        """End it for certain, however it is; it may be gone already."""
        ...


Launch = Callable[[WorkerSpec], WorkerHandle]  # returns at once; somewhere, SearchWorker(spec).serve() begins


@dataclass(slots=True)
class Contexts:
    """What all workers have to have loaded, and the memory in which steps are searched, where they are."""

    paths: dict[int, Path] = field(default_factory=dict)
    step_memory: SharedMemory | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while these and loaded workers change


class Supervisor:
    """One worker's place. `channel` is the way to it, None while it is away."""

    def __init__(
        self, launch: Launch, make_spec: Callable[[str], WorkerSpec], spin_ns: int, contexts: Contexts
    ) -> None:
        self.channel: Channel | None = None
        self.handle: WorkerHandle | None = None  # the latest
        self.came_up = threading.Event()  # or failed to, the first time
        self.fault = ""  # the last thing that went wrong
        self.num_losses = 0
        self._launch, self._make_spec, self._spin_ns, self._contexts = launch, make_spec, spin_ns, contexts
        self._coming: Channel | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="search-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the worker and what watches it."""
        self._closing.set()
        for channel in (self.channel, self._coming):
            if channel is not None:
                channel.lose()
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
        """A worker's life from start to end."""
        with Rendezvous() as rendezvous:
            handle = self.handle = self._launch(self._make_spec(rendezvous.address))
            try:
                connection = rendezvous.accept(START_S, lambda: self._why_not(handle))
            except BaseException:
                handle.kill()
                raise
        try:
            channel = self._coming = Channel(connection, self._spin_ns)
            if self._closing.is_set():  # `close` may have looked before the channel was there
                channel.lose()
            self._load(channel)
            self.came_up.set()
            _await_end(channel)
            self.num_losses += not self._closing.is_set()
        finally:
            self.channel = None
            handle.kill()

    def _why_not(self, handle: WorkerHandle) -> str | None:
        return "the search workers are being closed" if self._closing.is_set() else handle.fault()

    def _load(self, channel: Channel) -> None:
        """Load all contexts, and let searches come as soon as none is missing."""
        loaded: dict[int, Path] = {}
        attached = None
        while True:
            with self._contexts.lock:
                wanted, memory = dict(self._contexts.paths), self._contexts.step_memory
                if loaded == wanted and attached is memory:
                    self.channel = channel
                    return
            wants_memory = memory is not None and memory is not attached and memory.is_open
            if wants_memory and (failure := tell_all([channel], ATTACH, memory=memory)):
                raise SearchLostError(f"a search worker cannot map the memory of steps: {failure}; free memory")
            attached = memory
            for context_id in loaded.keys() - wanted.keys():
                tell_all([channel], UNLOAD, str(context_id))
            for context_id, path in wanted.items() - loaded.items():
                if failure := tell_all([channel], LOAD, f"{context_id} {path}"):
                    self.fault = failure  # the client searches in its place what it does not have
            if channel.lost:
                raise SearchLostError("a search worker was lost while it loaded its contexts; it is started again")
            loaded = wanted


def tell_all(
    channels: list[Channel],
    kind: int,
    text: str = "",
    memory: SharedMemory | None = None,
    patience_s: float = LOAD_S,  # then who is silent is lost
) -> str | None:
    """Let the workers open an artifact, forget a context, or map the memory in which steps are searched.

    All at the same time. Returns what one of them says went wrong.
    """
    fd = None if memory is None else memory.fd
    await_answers([channel for channel in channels if channel.tell(kind, text, fd)], patience_s)
    failures = [channel.failure for channel in channels if not channel.lost]
    return next((failure for failure in failures if failure), None)


def _await_end(channel: Channel) -> None:
    """Return when the worker has gone or is given up."""
    poller = select.poll()
    poller.register(channel.connection, 0)  # no more than that it is closed, on either side
    while not channel.lost:
        if poller.poll(1000):
            with contextlib.suppress(OSError):
                channel.lose()
