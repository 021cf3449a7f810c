"""What other threads hand to the thread that owns the engine."""

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
class News:
    """What came since the last look, in order."""

    arrived: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.arrived or self.cancelled or self.calls)


class Inbox:
    """Handing in never waits for a step."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._news = News()
        self._nudged = False
        self._refusal: ServingError | None = None

    def close(self, refusal: ServingError) -> None:
        """What is here is still taken; what would be handed in from now on is refused, for nobody would take it."""
        with self._changed:
            self._refusal = refusal

    def submit(self, request: Request) -> None:
        """Its place was reserved with `Flow.reserve`, and is given back when the request is over."""
        with self._changed:
            if self._refusal is not None:
                raise copy(self._refusal)
            self._news.arrived.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is: no step after the one under way has a row of it."""
        with self._changed:
            self._news.cancelled.append(request)
            self._changed.notify()

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run something on the engine's thread, between two steps, after what was handed in before."""
        future: Future[Any] = Future()
        with self._changed:
            if self._refusal is not None:
                future.set_exception(copy(self._refusal))
                return future
            self._news.calls.append((work, future))
            self._changed.notify()
        return future

    def nudge(self) -> None:
        """A reader has read: its request may go on."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def take(self) -> News:
        with self._changed:
            news, self._news = self._news, News()
            self._nudged = False
        return news

    def wait(self, seconds: float | None) -> None:
        """Until something is handed in, or that long."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news) or self._nudged, seconds)
