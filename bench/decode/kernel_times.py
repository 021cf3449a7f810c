"""What the kernels of a captured step take, one by one, by torch's profiler."""

import warnings
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# part of a kernel's name -> what it is for
PURPOSES = {
    "match_centroids": "search",
    "score_rows": "search",
    "clear_scores": "search",
    "add_list": "search",
    "sum_tiles": "search",
    "combine_": "select",
    "find_keys": "select",
    "write_keys": "select",
    "look_up_rows": "gather",
    "gather_rows": "gather",
    "attend_step": "attend",
}


def kernel_times(run: Callable[[], object], num_runs: int) -> dict[str, float]:
    """Kernel name -> µs of the device per run. Kernels that run side by side count in full, each."""
    run()
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_runs):
            run()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / num_runs for event in profiler.key_averages()}


def times_by_purpose(times_us: dict[str, float], num_calls: int) -> dict[str, float]:
    """µs of search, select, gather and attend, as far as there are such kernels, per call of those in a run."""
    sums: dict[str, float] = {}
    for name, us in times_us.items():
        for part, purpose in PURPOSES.items():
            if part in name:
                sums[purpose] = sums.get(purpose, 0.0) + us / num_calls
    return {purpose: round(us, 2) for purpose, us in sums.items()}
