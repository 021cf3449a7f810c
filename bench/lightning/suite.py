"""Shared by the suites `topk`, `decode` and `hisa`: trials are gated, timed in CUDA graphs, and saved one by one."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.records import Records
from bench.timing import finish, gate, measure

Call = Callable[[], object]
KEY = ("suite", "name", "variant", "case")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trial whose inputs are made, before measuring."""

    faults: Callable[[], list[str]]  # returns what is wrong with the results
    calls: Sequence[Call]  # the same call on different inputs; captured together
    figures: dict[str, Any] = field(default_factory=dict)  # saved with the time
    graph: bool = True  # whether the calls may be captured


@dataclass(frozen=True, slots=True)
class Trial:
    """One figure: its key, and how its inputs are made."""

    suite: str
    name: str
    variant: str
    case: str
    prepare: Callable[[], Prepared]
    moved_bytes: int = 0  # least bytes that must be read and written
    num_flops: int = 0  # of matrix products

    @property
    def key(self) -> dict[str, Any]:
        return {"suite": self.suite, "name": self.name, "variant": self.variant, "case": self.case}


def run_suite(trials: Iterable[Trial], out: Path | None, machine: dict[str, Any], seconds: float, device: str) -> None:
    """Measure the trials that the file lacks; begin none after that many seconds. A wrong result ends the run."""
    records = Records(out, {"bench": "lightning", "machine": machine}, KEY)
    deadline = time.monotonic() + seconds
    for trial in trials:
        if records.has(**trial.key):
            continue
        if time.monotonic() > deadline:
            print(f"time is up before {trial.key}; call again to go on")
            break
        try:
            records.add({**trial.key, **_figures(trial, device)})
        except torch.OutOfMemoryError as error:
            records.add({**trial.key, "refused": f"out of memory: {str(error).split('.')[0]}"})
    finish(records.content, None)  # the file already has every case and this run's header


def _figures(trial: Trial, device: str) -> dict[str, Any]:
    prepared = trial.prepare()
    faults = prepared.faults()
    gate(not faults, f"{trial.key}: {'; '.join(faults)}")
    if device == "cpu":
        figures: dict[str, Any] = {"p50_us": round(1e3 * measure(prepared.calls[0], seconds=0.05)["p50_ms"], 2)}
    else:
        from bench.decode.gpu_timing import time_graph, time_replays

        timing = time_graph(prepared.calls) if prepared.graph else time_replays(prepared.calls[0], 1)
        figures = timing.to_json()
    if trial.moved_bytes:
        figures["gbps"] = round(trial.moved_bytes / figures["p50_us"] / 1e3, 1)
    if trial.num_flops:
        figures["tflops"] = round(trial.num_flops / figures["p50_us"] / 1e6, 1)
    return {**figures, **prepared.figures}
