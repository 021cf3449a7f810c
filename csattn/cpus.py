"""How many CPUs this process may use."""

import os
import sys
import threading
from contextlib import suppress


def available_cpus() -> int:
    """The CPUs that the process is allowed to run on, where the system tells; all of them elsewhere (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stand_behind(nice: int = 10) -> None:
    """Let the calling thread alone come second where several want the same CPU. Elsewhere than on Linux: nothing."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # not allowed: it stays where it is
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
