"""Timing on a GPU: CUDA graphs replayed between events, and the best rates of the machine's memories and link."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.timing import machine as host_machine

L2_BYTES = 60 << 20  # the largest L2 cache of the devices that this runs on
PROBE_BYTES = 4 << 30
WARM_UP_RUNS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call in microseconds."""

    p50_us: float
    p99_us: float
    num_samples: int

    def to_json(self) -> dict[str, float]:
        return {"p50_us": round(self.p50_us, 2), "p99_us": round(self.p99_us, 2), "num_samples": self.num_samples}


def time_graph(
    calls: Sequence[Callable[[], object]],  # captured in this order, each with inputs of its own
    seconds: float = 0.3,
    least: int = 20,  # replays
) -> Timing:
    """Capture the calls in one graph, replay it, and return the time of one call.

    The inputs of all calls together should not fit in the L2 cache: see `num_input_sets`.
    """
    graph = capture(calls)
    return time_replays(graph.replay, len(calls), seconds, least)


def capture(
    calls: Sequence[Callable[[], object]],
    warm_up: Sequence[Callable[[], object]] = (),  # runs before the capture; default: `calls`
) -> torch.cuda.CUDAGraph:
    """Capture all calls in one graph, after WARM_UP_RUNS runs outside it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            for call in warm_up or calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_replays(run: Callable[[], object], calls_per_run: int, seconds: float = 0.3, least: int = 20) -> Timing:
    """Return the time of one call, of which `run` enqueues `calls_per_run` on the current stream."""
    run()
    first_ms = _elapsed_ms(run, 2) / 2
    num_runs = int(min(2000, max(least, seconds * 1e3 / max(first_ms, 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times_us = [a.elapsed_time(b) * 1e3 / calls_per_run for a, b in pairwise(events)]
    p50, p99 = np.percentile(times_us, [50, 99])
    return Timing(float(p50), float(p99), num_runs)


def num_input_sets(bytes_per_call: int, most: int) -> int:
    """Return how many input sets a graph needs so that none is still in the L2 cache when its turn comes again."""
    return int(min(most, max(1, -(-4 * L2_BYTES // max(1, bytes_per_call)))))


def ceilings() -> dict[str, float]:
    """Return the best rates in GB/s of plain operations: device copy (read + write) and read, the link both ways."""
    source = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda").random_()
    half = PROBE_BYTES // 2
    copy_us = time_replays(lambda: source[half:].copy_(source[:half]), 1).p50_us
    read_us = time_replays(_best_read(source), 1).p50_us
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    upload_us = time_replays(lambda: source[: len(host)].copy_(host, non_blocking=True), 1, least=5).p50_us
    download_us = time_replays(lambda: host.copy_(source[: len(host)], non_blocking=True), 1, least=5).p50_us
    rates = {
        "copy_gbps": PROBE_BYTES / copy_us,
        "read_gbps": PROBE_BYTES / read_us,
        "h2d_gbps": len(host) / upload_us,
        "d2h_gbps": len(host) / download_us,
    }
    return {name: round(rate / 1e3, 1) for name, rate in rates.items()}


def device_machine() -> dict[str, Any]:
    """Describe the machine that the figures are measured on."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    host = host_machine()
    del host["load_average"]
    return {
        **host,
        "gpu": properties.name,
        "hbm_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _best_read(source: Tensor) -> Callable[[], object]:
    """Return the fastest of a few ways to read all of `source` once."""
    rows = source.view(torch.bfloat16).view(-1, 8192)
    vector = torch.ones(8192, dtype=torch.bfloat16, device=source.device)
    ways: list[Callable[[], object]] = [
        lambda: torch.mv(rows, vector),
        lambda: source.view(torch.float32).amax(),
        lambda: source.view(torch.int32).sum(dtype=torch.int32),
        _triton_read(source),
    ]
    return min(ways, key=lambda way: time_replays(way, 1, seconds=0.05, least=5).p50_us)


def _triton_read(source: Tensor) -> Callable[[], object]:
    from bench.decode.read_kernel import read_all

    out = torch.empty(1, dtype=torch.int32, device=source.device)
    return lambda: read_all(source.view(torch.int32), out)


def _elapsed_ms(run: Callable[[], object], times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
