"""Admission control: how many requests the service holds, and when a refused one should retry."""

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from threading import Lock

from workers.serving.messages import OverloadedError, ServingError

_REMEMBERED = 256  # ends of requests, from which the rate is estimated
_LONGEST_S = 600.0


class Flow:
    """Counts requests from their arrival to their end: running ones, queued ones, and those still being tokenised."""

    def __init__(self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self.fault: ServingError | None = None  # what every request gets while the engine does not work
        self.closed: ServingError | None = None  # what every request gets once the service closes
        self.num_in_flight = 0
        self._clock = clock
        self._lock = Lock()
        self._seen_at = clock()
        self._full_s = 0.0  # time since the last end during which max_running requests were in flight
        self._taken_s: deque[float] = deque(maxlen=_REMEMBERED)  # `_full_s` at each of the last ends while full

    @property
    def refusal(self) -> ServingError | None:
        return self.closed or self.fault

    def reserve(self) -> None:
        """Take a place, without waiting. Raises OverloadedError if all are taken, `closed` or `fault` if set."""
        with self._lock:
            if (error := self.refusal) is not None:
                raise copy(error)
            self._see_time()
            if self.num_in_flight >= self.max_running + self.max_queued:
                retry_after_s = self._retry_after_s()
                raise OverloadedError(
                    f"{self.num_in_flight} requests are being answered or waiting, as many as this service takes; try "
                    f"again in {retry_after_s:.0f} s",
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
        """Count the time since the last call if all request slots were in use.

        Other time says nothing about the rate: nobody may ask, or a request may wait for a build.
        """
        now = self._clock()
        if self._is_full:
            self._full_s += now - self._seen_at
        self._seen_at = now

    def _retry_after_s(self) -> float:
        """The time in which as many requests end as wait now, at the recent rate. Running ones count as half done."""
        num_done = len(self._taken_s) + self.max_running / 2
        seconds_each = (sum(self._taken_s) + self._full_s) / num_done
        num_waiting = max(1, self.num_in_flight - self.max_running)
        return min(_LONGEST_S, max(1.0, seconds_each * num_waiting))
