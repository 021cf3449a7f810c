"""StreamIndex's protocol: a warm-up call, a call for peak memory above the inputs, then the median time of calls."""

import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 3
SLOW_MS = 1000.0  # slower calls are not repeated


def measure(run: Callable[[], object], device: str, warm_up: Callable[[], object] | None = None) -> dict[str, Any]:
    """Return `ms`, `num_runs`, and on a GPU `peak_gib`: peak memory during a call, with outputs, without inputs.

    warm_up: a shorter call that compiles what `run` needs.
    """
    (warm_up or run)()
    ms, peak_gib = _watch(run, device)
    times = [ms] if ms > SLOW_MS else sorted(_elapsed_ms(run, device) for _ in range(REPEATS))
    figures: dict[str, Any] = {"ms": round(times[len(times) // 2], 4), "num_runs": len(times)}
    if peak_gib is not None:
        figures["peak_gib"] = round(peak_gib, 3)
    return figures


def recall(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Return mean and minimum over rows of the share of wanted indices in `got`, and the share of perfect rows.

    got, want: [num_queries, k], -1 padded, unique in a row.
    """
    num_wanted = (want >= 0).sum(1)
    rows = num_wanted > 0
    both = torch.cat((got.long(), want.long()), dim=1)[rows].sort(dim=1).values
    shared = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum(1)
    share = shared / num_wanted[rows]
    return {
        "mean": round(float(share.mean()), 6),
        "min": round(float(share.min()), 6),
        "perfect": round(float((share == 1).float().mean()), 6),
    }


def overlap(chosen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of each query's two selections: [num_queries] float64, 1 if both are empty.

    chosen, wanted: [num_queries, k] int32, -1 padded.
    """
    largest = int(max(chosen.max(), wanted.max())) + 2
    sets = []
    for indices in (chosen, wanted):
        members = torch.zeros(len(indices), largest, dtype=torch.bool, device=indices.device)
        sets.append(members.scatter_(1, indices.long() + 1, True)[:, 1:])
    both, either = (sets[0] & sets[1]).sum(1), (sets[0] | sets[1]).sum(1)
    return torch.where(either == 0, 1.0, both.double() / either.clamp(min=1))


def _watch(run: Callable[[], object], device: str) -> tuple[float, float | None]:
    """Return the milliseconds of one call, and its peak GiB (None on a CPU)."""
    if device == "cpu":
        return _elapsed_ms(run, device), None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ms = _elapsed_ms(run, device)
    return ms, (torch.cuda.max_memory_allocated() - before) / 2**30


def _elapsed_ms(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
