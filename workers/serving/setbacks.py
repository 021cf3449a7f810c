"""What failed is not tried again at once: it waits, and twice as long each time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from workers.serving.messages import FailedBuild

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 600.0
_MAX_KNOWN = 1000  # those that failed longest ago are forgotten
_MAX_TOLD = 5


@dataclass(frozen=True, slots=True)
class _Setback:
    num_tokens: int
    num_tries: int
    why: str
    until: float  # by the clock


class Setbacks:
    """Of builds, by what is built. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, _Setback] = OrderedDict()  # the newest last

    def add(self, key: Hashable, num_tokens: int, why: str) -> FailedBuild:
        """It failed."""
        num_tries = 1 + (self._known.pop(key).num_tries if key in self._known else 0)
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_tries - 1, 30))
        setback = self._known[key] = _Setback(num_tokens, num_tries, why, self._clock() + wait_s)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return self._told(setback)

    def forget(self, key: Hashable) -> None:
        """It has succeeded."""
        self._known.pop(key, None)

    def of(self, key: Hashable) -> FailedBuild | None:
        """If it still has to wait."""
        setback = self._known.get(key)
        return None if setback is None or setback.until <= self._clock() else self._told(setback)

    def told(self) -> tuple[FailedBuild, ...]:
        """The newest first."""
        return tuple(self._told(setback) for setback in list(reversed(self._known.values()))[:_MAX_TOLD])

    def _told(self, setback: _Setback) -> FailedBuild:
        retry_in_s = max(0.0, setback.until - self._clock())
        return FailedBuild(setback.num_tokens, setback.num_tries, setback.why, retry_in_s)
