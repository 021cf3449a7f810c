"""Exponential backoff: a failed build is tried again after a wait that doubles each time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace

from workers.serving.messages import FailedBuild

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 600.0
_MAX_KNOWN = 1000  # beyond, those that failed longest ago are forgotten
_MAX_REPORTED = 5


class BuildBackoff:
    """Failed builds by their key (what is built). For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, tuple[FailedBuild, float]] = OrderedDict()  # and until when; newest last

    def add(self, key: Hashable, num_tokens: int, why: str) -> FailedBuild:
        """Record a failure."""
        num_tries = 1 + (self._known.pop(key)[0].num_tries if key in self._known else 0)
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_tries - 1, 30))
        failed = FailedBuild(num_tokens, num_tries, why, wait_s)
        self._known[key] = failed, self._clock() + wait_s
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return failed

    def forget(self, key: Hashable) -> None:
        """Forget the failures of a build that has succeeded."""
        self._known.pop(key, None)

    def of(self, key: Hashable) -> FailedBuild | None:
        """The last failure, if the build still has to wait; else None."""
        failed = self._now(*self._known[key]) if key in self._known else None
        return failed if failed and failed.retry_in_s else None

    def report(self) -> tuple[FailedBuild, ...]:
        """The last _MAX_REPORTED failures, the newest first."""
        return tuple(self._now(*known) for known in list(reversed(self._known.values()))[:_MAX_REPORTED])

    def _now(self, failed: FailedBuild, until: float) -> FailedBuild:
        return replace(failed, retry_in_s=max(0.0, until - self._clock()))
