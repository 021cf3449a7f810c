"""How many requests may be here at the same time, and when one that finds no room should come again."""

import time
from collections import deque
from collections.abc import Callable
from threading import Lock

from workers.serving.messages import OverloadedError, ServingError, copy_of

_REMEMBERED = 32  # ends of requests, of which the rate is told
_UNMEASURED_S = 1.0  # to come again, before any request has ended
_LONGEST_S = 600.0


class Flow:
    """Counts requests from their arrival to their end: running ones, queued ones, and those still being tokenised."""

    def __init__(self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.fault: ServingError | None = None  # what every request is told while none can be answered
        self.closed: ServingError | None = None  # and what from when on none will be
        self.num_in_flight = 0
        self.num_refused = 0
        self._clock = clock
        self._lock = Lock()
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def refusal(self) -> ServingError | None:
        return self.closed or self.fault

    def reserve(self) -> None:
        """Take a place, at once or not at all."""
        with self._lock:
            if (error := self.refusal) is not None:
                raise copy_of(error)
            if self.num_in_flight >= self.max_running + self.max_queued:
                self.num_refused += 1
                retry_after_s = self._retry_after_s()
                raise OverloadedError(
                    f"{self.num_in_flight} requests are being answered or wait, which is all that there is room for; "
                    f"come again in {retry_after_s:.0f} s",
                    retry_after_s=retry_after_s,
                )
            self.num_in_flight += 1

    def release(self, *, was_answered: bool) -> None:
        with self._lock:
            self.num_in_flight -= 1
            assert self.num_in_flight >= 0, "a place was given back twice"
            if was_answered:
                self._ends.append(self._clock())

    def _retry_after_s(self) -> float:
        """In what time as many requests end as wait now, at the rate of the last ones."""
        if not self._ends:
            return _UNMEASURED_S
        seconds_each = (self._clock() - self._ends[0]) / len(self._ends)
        num_waiting = max(1, self.num_in_flight - self.max_running)
        return min(_LONGEST_S, max(1.0, seconds_each * num_waiting))
