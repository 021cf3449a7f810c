"""The number of CPUs that this process may use, and what they multiply fast."""

import os
from functools import cache
from pathlib import Path

_FOR_BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # as Linux names instructions


def available_cpus() -> int:
    """Return how many CPUs the process's affinity mask allows; all CPUs on systems without masks (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions for products in bfloat16; without them, they take longer than float32's.

    False where this is not known: on systems other than Linux on x86-64.
    """
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not _FOR_BFLOAT16.isdisjoint(words)
