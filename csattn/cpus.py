"""How many CPUs this process may use."""

import os


def available_cpus() -> int:
    """The CPUs that the process is allowed to run on, where the system tells; all of them elsewhere (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
