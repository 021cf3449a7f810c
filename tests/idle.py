"""Check that this process is idle, in spite of work that earlier tests have left."""

import time

# Threads that spin are never idle for a whole window; leftovers of other tests end sooner or later.
_TRIES = 40
_QUIET_SHARE = 0.3  # of one core


def is_idle(window_s: float) -> bool:
    for _ in range(_TRIES):
        before = time.process_time()
        time.sleep(window_s)
        if time.process_time() - before < _QUIET_SHARE * window_s:
            return True
    return False
