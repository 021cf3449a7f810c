"""The number of CPUs that this process may use."""

import os


def available_cpus() -> int:
    """Return how many CPUs the process's affinity mask allows; all CPUs on systems without masks (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
