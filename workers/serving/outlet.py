"""The queue of a request's events: the scheduler's thread fills it, the reader's event loop empties it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock

from workers.serving.messages import Event, ServingError

MAX_UNREAD = 256  # events: a request with so many is paused until half of them are read


class Outlet:
    """Events in order, with backpressure: a full outlet pauses its request. Beyond MAX_UNREAD it takes only the events
    of the step that filled it, and the one that ends the request."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, on_room: Callable[[], None] = lambda: None
    ) -> None:
        self._loop, self._on_room = loop, on_room
        self._lock = Lock()
        self._waiting: deque[Event | ServingError] = deque()
        self._woken = asyncio.Event()
        self.is_full = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event | ServingError) -> None:
        with self._lock:
            self._waiting.append(event)
            self.is_full = self.is_full or len(self._waiting) >= MAX_UNREAD

    def take(self) -> Event | ServingError | None:
        with self._lock:
            event = self._waiting.popleft() if self._waiting else None
            has_room = self.is_full and len(self._waiting) <= MAX_UNREAD // 2
            if has_room:
                self.is_full = False
        if has_room:
            self._on_room()
        return event

    async def next(self) -> Event | ServingError:
        """Wait for the next event. For one reader, in the outlet's event loop."""
        while (event := self.take()) is None:
            self._woken.clear()  # no wake-up is lost: `wake` schedules the setting in this loop, so it comes later
            await self._woken.wait()
        return event

    @staticmethod
    def wake(outlets: Iterable["Outlet"]) -> None:
        """Wake the readers of these outlets, with one call into each event loop however many readers it has."""
        awaited = [(outlet._loop, outlet._woken) for outlet in outlets if outlet._loop is not None]
        for loop in {loop for loop, _ in awaited}:
            with suppress(RuntimeError):  # the loop is closed, so its readers are gone
                loop.call_soon_threadsafe(_set_all, [woken for other, woken in awaited if other is loop])


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
