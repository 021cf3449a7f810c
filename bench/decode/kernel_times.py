"""Device time of each kernel of a step, from torch's profiler."""

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

# part of a kernel's name -> the kernel's purpose
PURPOSES = {
    "project_queries": "search",
    "score_codes": "search",
    "choose_codes": "select",
    "match_centroids": "search",
    "score_lists": "search",
    "score_pages": "search",  # of other methods
    "score_components": "search",
    "multiply_centroids": "search",
    "add_products": "search",
    "refine_bins": "select",
    "count_ties": "select",
    "find_among_fine": "select",
    "rows_of_pages": "select",
    "sum_tiles": "search",
    "combine_": "select",
    "find_keys": "select",
    "write_keys": "select",
    "attend_rest": "rest",
    "fetch_selections": "wait",  # for the CPU, in placement `host`
    "look_up_rows": "gather",
    "gather_rows": "gather",
    "attend_step": "attend",
    "low_bit": "attend",
}


class Span(NamedTuple):
    """A kernel's run on one stream."""

    name: str
    stream: int
    start_us: float
    end_us: float


def kernel_times(run: Callable[[], object], num_runs: int) -> dict[str, float]:
    """Return kernel name -> µs of device time per run. Kernels that overlap on two streams each count in full."""
    run()
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_runs):
            run()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return {name: us / num_runs for name, us in own_times(spans).items()}


def own_times(spans: list[Span]) -> dict[str, float]:
    """Return kernel name -> µs.

    With programmatic dependent launch, a kernel may start while its predecessor on the stream is still running. It then
    counts from the predecessor's end, because until then it may have waited for it.
    """
    sums: dict[str, float] = {}
    ended: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.end_us):
        begun = max(span.start_us, ended.get(span.stream, span.start_us))
        sums[span.name] = sums.get(span.name, 0.0) + span.end_us - begun
        ended[span.stream] = span.end_us
    return sums


def times_by_purpose(
    times_us: dict[str, float], num_calls: int, purposes: Mapping[str, str] = PURPOSES
) -> dict[str, float]:
    """Return purpose -> µs per call, without purposes that no kernel has. num_calls: calls in a run."""
    sums: dict[str, float] = {}
    for name, us in times_us.items():
        for part, purpose in purposes.items():
            if part in name:
                sums[purpose] = sums.get(purpose, 0.0) + us / num_calls
    return {purpose: round(us, 2) for purpose, us in sums.items()}
