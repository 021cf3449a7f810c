"""The queue of requests, cancellations and calls from other threads to the thread that owns the engine."""

from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from workers.serving.messages import ServingError
from workers.serving.request import Request

Call = tuple[Callable[[], Any], "Future[Any]"]


@dataclass(slots=True)
class InboxBatch:
    """What has been handed in since the last `take`, in order."""

    arrived: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.arrived or self.cancelled or self.calls)


class Inbox:
    """A thread-safe event queue. Handing in never waits for a step."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._batch = InboxBatch()
        self._nudged = False
        self._refusal: ServingError | None = None

    def close(self, refusal: ServingError) -> None:
        """Refuse what is handed in from now on, as nobody would take it. What is queued is still taken."""
        with self._changed:
            self._refusal = refusal

    def submit(self, request: Request) -> None:
        """Queue a request. The caller has reserved its place (`Flow.reserve`); the scheduler releases it at its end."""
        with self._changed:
            if self._refusal is not None:
                raise copy(self._refusal)
            self._batch.arrived.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """End a request, queued or running: no step after the current one has a row of it."""
        with self._changed:
            self._batch.cancelled.append(request)
            self._changed.notify()

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run `work` on the engine's thread, between two steps, after everything that was handed in before."""
        future: Future[Any] = Future()
        with self._changed:
            if self._refusal is not None:
                future.set_exception(copy(self._refusal))
                return future
            self._batch.calls.append((work, future))
            self._changed.notify()
        return future

    def nudge(self) -> None:
        """Wake the thread because a full outlet has room again: its request may continue."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def take(self) -> InboxBatch:
        with self._changed:
            batch, self._batch = self._batch, InboxBatch()
            self._nudged = False
        return batch

    def wait(self, seconds: float | None) -> None:
        """Wait until something is handed in, for at most so many seconds; None: without limit."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._batch) or self._nudged, seconds)
