"""Shared by benchmarks: options, gates before any figure, times, memory bandwidth, a JSON object as the last line."""

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn import __version__
from csattn.cpu.jit import exact_kernel, readonly
from csattn.cpu.lanes import sum_of_lanes
from csattn.cpu.simd import I32x16, fill, load
from workers.cli.version import commit

PROBE_BYTES = 1 << 28  # far more than any cache


class GateError(Exception):
    """A result is wrong, so its speed is of no interest."""


def gate(condition: bool, message: str) -> None:
    """Raise GateError with the message unless the condition holds."""
    if not condition:
        raise GateError(message)


def end_as_interrupted() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that its children end and its scratch files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def options_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser of a program's options with --json; its help is the program's docstring."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


def numbers(text: str) -> list[int]:
    """Parse an option such as 1,4,8."""
    return [int(number) for number in text.split(",") if number.strip()]


def measure(run: Callable[[], object], seconds: float = 0.5, least: int = 5) -> dict[str, float]:
    """Return p50, p99 and the least time of `run` in ms, after one warm-up run, over about `seconds` seconds.

    `num` is the number of times; of few, p99 is about the longest.
    `cpu_p50_ms` is the calling thread's CPU time, which leaves out waiting for other processes on a shared machine.
    """
    run()
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times_ms) < least or time.perf_counter() < deadline:
        started, cpu_started = time.perf_counter(), time.thread_time()
        run()
        times_ms.append((time.perf_counter() - started) * 1e3)
        cpu_ms.append((time.thread_time() - cpu_started) * 1e3)
    p50, p99 = np.percentile(times_ms, [50, 99])
    return {
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "min_ms": round(min(times_ms), 4),
        "cpu_p50_ms": round(float(np.median(cpu_ms)), 4),
        "num": len(times_ms),
    }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99, maximum and number of the times; an empty dict without times.

    Below a hundred times there is no p99, because it would depend on only one or two of them.
    """
    if not seconds:
        return {}
    p50, p99, most = (round(1e3 * float(np.percentile(seconds, p)), 1) for p in (50, 99, 100))
    high = {"p99_ms": p99} if len(seconds) >= 100 else {}
    return {"p50_ms": p50, **high, "most_ms": most, "num": len(seconds)}


def read_bandwidth_gbps(num_threads: int = 1) -> float:
    """Return the rate in GB/s at which num_threads threads read uncached memory: the best of several tries."""
    memory = readonly(np.ones(PROBE_BYTES, np.uint8))
    share = PROBE_BYTES // num_threads // 256 * 256

    def read_all() -> None:
        threads = [threading.Thread(target=_read, args=(memory, i * share, share)) for i in range(1, num_threads)]
        for thread in threads:
            thread.start()
        _read(memory, 0, share)
        for thread in threads:
            thread.join()

    return share * num_threads / (measure(read_all, seconds=1.0)["min_ms"] * 1e-3) / 1e9


@exact_kernel
def _read(memory: NDArray[np.uint8], start: int, num_bytes: int) -> int:
    a, b, c, d = fill(I32x16, 0), fill(I32x16, 0), fill(I32x16, 0), fill(I32x16, 0)
    for at in range(start, start + num_bytes, 256):
        a += load(I32x16, memory, at)
        b += load(I32x16, memory, at + 64)
        c += load(I32x16, memory, at + 128)
        d += load(I32x16, memory, at + 192)
    total: int = sum_of_lanes(a + b + c + d)
    return total


def machine() -> dict[str, Any]:
    """Return facts about the machine and the run: its GPU if it has one, versions, the command line, and the commit,
    which ends in -dirty if the tree has changes."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load_average = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    facts: dict[str, Any] = {
        "cpu": model,
        "cpus": os.cpu_count(),
        "load_average": load_average,
        "python": platform.python_version(),
    }
    if shutil.which("nvidia-smi"):  # it leaves CUDA alone, which a process that forks must not start
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"]
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    versions = {name: version(name) for name in ("numpy", "torch", "transformers")}
    command = shlex.join(["python", *sys.orig_argv[1:]])
    return {**facts, **versions, "csattn": __version__, "commit": commit(), "command": command}


def finish(result: dict[str, Any], json_path: Path | None) -> None:
    """Print the result as the last line, one JSON object, and save it in a file if one is named.

    If the result has no `machine`, this machine's facts are added.
    """
    result = {"machine": machine(), **result}
    if json_path is not None:
        write_json(json_path, result)
    print(json.dumps(result))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically: after a failure it has its earlier content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)
