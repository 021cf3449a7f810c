"""The queue of requests and calls from other threads to the thread that owns the engine."""

from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from threading import Condition
from typing import Any

from workers.serving.messages import ServingError
from workers.serving.request import Request

Call = tuple[Callable[[], Any], "Future[Any]"]


class Inbox:
    """A thread-safe event queue. Handing in never waits for a step."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._arrived: list[Request] = []
        self._calls: list[Call] = []
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
            self._arrived.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """End a request, queued or running: no step after the current one has a row of it."""
        request.is_cancelled = True
        self.nudge()

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run `work` on the engine's thread, between two steps, after everything that was handed in before."""
        future: Future[Any] = Future()
        with self._changed:
            if self._refusal is not None:
                future.set_exception(copy(self._refusal))
                return future
            self._calls.append((work, future))
            self._changed.notify()
        return future

    def nudge(self) -> None:
        """Wake the thread because a request may continue, its full outlet having room again, or has to end."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def take(self) -> tuple[list[Request], list[Call]]:
        """Return the requests and the calls that have been handed in since the last time, each in order."""
        with self._changed:
            taken = self._arrived, self._calls
            self._arrived, self._calls, self._nudged = [], [], False
        return taken

    def wait(self, seconds: float | None) -> None:
        """Wait until something is handed in, for at most so many seconds; None: without limit."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrived or self._calls or self._nudged), seconds)
