"""How many requests may be here at the same time, and when one that finds no room should come again."""

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from threading import Lock

from workers.serving.messages import OverloadedError, ServingError

_REMEMBERED = 256  # ends of requests, of which the rate is told
_LONGEST_S = 600.0


class Flow:
    """Counts requests from their arrival to their end: running ones, queued ones, and those still being tokenised."""

    def __init__(self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.fault: ServingError | None = None  # what every request is told while none can be answered
        self.closed: ServingError | None = None  # and what from when on none will be
        self.num_in_flight = 0
        self._clock = clock
        self._lock = Lock()
        self._seen_at = clock()
        self._full_s = 0.0  # since the last end, with as many requests at work as can be
        self._taken_s: deque[float] = deque(maxlen=_REMEMBERED)  # the same, of ends in such times

    @property
    def refusal(self) -> ServingError | None:
        return self.closed or self.fault

    def reserve(self) -> None:
        """Take a place, at once or not at all."""
        with self._lock:
            if (error := self.refusal) is not None:
                raise copy(error)
            self._see_time()
            if self.num_in_flight >= self.max_running + self.max_queued:
                retry_after_s = self._retry_after_s()
                raise OverloadedError(
                    f"{self.num_in_flight} requests are being answered or wait, which is all that there is room for; "
                    f"come again in {retry_after_s:.0f} s",
                    retry_after_s=retry_after_s,
                )
            self.num_in_flight += 1

    def release(self, *, was_answered: bool) -> None:
        with self._lock:
            self._see_time()
            if was_answered and self._is_full:
                self._taken_s.append(self._full_s)
                self._full_s = 0.0
            self.num_in_flight -= 1
            assert self.num_in_flight >= 0, "a place was given back twice"

    @property
    def _is_full(self) -> bool:
        return self.num_in_flight >= self.max_running

    def _see_time(self) -> None:
        """Only time in which all places are at work tells of a rate: not when nobody asks, or one waits for a build."""
        now = self._clock()
        if self._is_full:
            self._full_s += now - self._seen_at
        self._seen_at = now

    def _retry_after_s(self) -> float:
        """In what time as many requests end as wait now, at the rate of the last ones; half of what runs is done."""
        num_done = len(self._taken_s) + self.max_running / 2
        seconds_each = (sum(self._taken_s) + self._full_s) / num_done
        num_waiting = max(1, self.num_in_flight - self.max_running)
        return min(_LONGEST_S, max(1.0, seconds_each * num_waiting))
