"""Where a request's events wait for their reader: filled by the scheduler's thread, emptied by the reader's."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock

from workers.serving.messages import Event, ServingError

MAX_UNREAD = 256  # events; a request with so many decodes no further until half of them are read


class Outlet:
    """Events in order. A reader that does not read makes it full, which pauses its request: it never grows further
    than by the event that ends the request."""

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
        """For one reader, in the loop that was given."""
        while (event := self.take()) is None:
            self._woken.clear()  # what is put from here on sets it, later, in this loop
            await self._woken.wait()
        return event

    @staticmethod
    def wake(outlets: Iterable["Outlet"]) -> None:
        """Tell readers that there is something to read: one call into each event loop, however many readers it has."""
        awaited = [(outlet._loop, outlet._woken) for outlet in outlets if outlet._loop is not None]
        for loop in {loop for loop, _ in awaited}:
            with suppress(RuntimeError):  # the loop is closed, and with it went the readers
                loop.call_soon_threadsafe(_set_all, [woken for other, woken in awaited if other is loop])


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
