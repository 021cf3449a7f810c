"""Whether this process does nothing, told apart from what tests before it have left to do."""

import time

# Threads that spin are never quiet for a whole window; leftovers of other tests are, sooner or later.
_TRIES = 40
_QUIET_SHARE = 0.3  # of one core


def is_idle(window_s: float) -> bool:
    for _ in range(_TRIES):
        before = time.process_time()
        time.sleep(window_s)
        if time.process_time() - before < _QUIET_SHARE * window_s:
            return True
    return False
