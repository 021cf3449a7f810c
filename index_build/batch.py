"""Many contexts in one go, in this process: a model is loaded once, a failure stops nothing."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from csattn.config import IndexConfig
from csattn.errors import CsattnError
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import choose_wrapping, context_ids
from index_build.inputs import choose_device, make_config, read_text
from index_build.job_list import Job
from index_build.pipeline import BuildProgress, BuildReport, build_artifact

Outcome = Literal["built", "resumed", "reused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("built", "resumed", "reused", "failed")


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far one job is."""

    job_idx: int
    context_len: int
    first_share: float  # of the context, where this run began: more than 0 when an earlier one was interrupted
    share: float  # of the context, in all layers
    where: str  # "layer 3/30 index"


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job."""

    job: Job
    outcome: Outcome
    seconds: float
    artifact_id: str | None = None
    path: Path | str | None = None  # or its URL
    context_len: int = 0
    error: str | None = None  # a sentence, when it failed
    attempts: int = 1  # more than 1 when workers died over a piece of it
    prefilled_layers: int = 0  # in this run, on a cluster
    index_shards: int = 0  # made in this run, on a cluster

    @property
    def tokens_per_s(self) -> float | None:
        """None where nothing was built from the first layer on."""
        return self.context_len / self.seconds if self.outcome == "built" and self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        rate = self.tokens_per_s
        return {
            "line": self.job.line,
            "context": str(self.job.context),
            "outcome": self.outcome,
            "artifact": self.artifact_id,
            "path": None if self.path is None else str(self.path),
            "context_len": self.context_len,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": None if rate is None else round(rate, 1),
            "attempts": self.attempts,
            "prefilled_layers": self.prefilled_layers,
            "index_shards": self.index_shards,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of all jobs, in the list's order."""

    results: tuple[JobResult, ...]
    seconds: float

    def count(self, outcome: Outcome) -> int:
        return Counter(result.outcome for result in self.results)[outcome]

    def to_json(self) -> dict[str, Any]:
        return {
            "jobs": [result.to_json() for result in self.results],
            **{outcome: self.count(outcome) for outcome in OUTCOMES},
            "seconds": round(self.seconds, 3),
        }


def run_batch(
    jobs: Sequence[Job],
    store: Path | str,
    *,
    device: str = "auto",
    num_threads: int | None = None,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
    on_result: Callable[[JobResult], None] = lambda result: None,
) -> BatchReport:
    """Build all jobs one after the other, those of one model together; whatever fails is in the report."""
    started = time.perf_counter()
    device = choose_device(device)
    results: dict[int, JobResult] = {}
    for group in by_model(jobs):
        _run_group(jobs, group, store, device, num_threads, on_progress, on_result, results)
    return BatchReport(tuple(results[idx] for idx in range(len(jobs))), time.perf_counter() - started)


def by_model(jobs: Sequence[Job]) -> list[list[int]]:
    """The positions of the jobs of each model, in the order in which models first appear."""
    groups: dict[tuple[str | None, str], list[int]] = {}
    for idx, job in enumerate(jobs):
        groups.setdefault((job.options.model, job.options.dtype), []).append(idx)
    return list(groups.values())


def _run_group(
    jobs: Sequence[Job],
    group: list[int],
    store: Path | str,
    device: str,
    num_threads: int | None,
    on_progress: Callable[[JobProgress], None],
    on_result: Callable[[JobResult], None],
    results: dict[int, JobResult],
) -> None:
    """Jobs of one model, which is gone from memory when this returns."""
    options = jobs[group[0]].options
    loaded: LoadedModel | None = None
    fault = ""
    try:
        loaded = load_model(options.model, options.dtype, device)
    except Exception as error:
        fault = sentence(error)
    for idx in group:
        if loaded is None:
            results[idx] = JobResult(jobs[idx], "failed", 0.0, error=fault)
        else:
            results[idx] = build_job(idx, jobs[idx], loaded, store, num_threads=num_threads, on_progress=on_progress)
        on_result(results[idx])


def build_job(
    job_idx: int,
    job: Job,
    loaded: LoadedModel,
    store: Path | str,
    *,
    num_threads: int | None = None,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
) -> JobResult:
    """Build one context with a model that is in memory; an error becomes the result's sentence."""
    started = time.perf_counter()
    try:
        report, context_len = _build(job_idx, job, loaded, store, num_threads, on_progress)
    except Exception as error:  # one context must not end the others, whatever is wrong with it
        return JobResult(job, "failed", time.perf_counter() - started, error=sentence(error))
    outcome: Outcome = "reused" if report.reused else "resumed" if report.resumed_at else "built"
    seconds = time.perf_counter() - started
    return JobResult(job, outcome, seconds, report.artifact_id, report.place, context_len)


def prepare(job: Job, loaded: LoadedModel, device: str) -> tuple[NDArray[np.int32], IndexConfig, dict[str, Any]]:
    """The context's token ids [context_len], how its index is made on that device, and what the manifest notes."""
    options = job.options
    config = make_config(options.preset, options.index_changes, device)
    wrapping = choose_wrapping(loaded.tokenizer, options.chat)
    token_ids = context_ids(loaded.tokenizer, read_text(str(job.context)), wrapping)
    return token_ids, config, {"wrapping": wrapping, "preset": options.preset, "source": job.context.name}


def sentence(error: Exception) -> str:
    """An error on one line; the project's own are sentences already."""
    lines = str(error).strip().splitlines()
    if isinstance(error, CsattnError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _build(
    job_idx: int,
    job: Job,
    loaded: LoadedModel,
    store: Path | str,
    num_threads: int | None,
    on_progress: Callable[[JobProgress], None],
) -> tuple[BuildReport, int]:
    """The build's report and the context's length in tokens."""
    token_ids, config, notes = prepare(job, loaded, loaded.device.type)
    teller = _Teller(job_idx, len(token_ids), on_progress)
    report = build_artifact(
        loaded,
        token_ids,
        config,
        store,
        notes=notes,
        on_progress=teller.tell,
        on_wait=teller.tell_waiting,
        num_threads=num_threads,
    )
    return report, len(token_ids)


class _Teller:
    """Turns a build's progress into its job's."""

    def __init__(self, job_idx: int, context_len: int, on_progress: Callable[[JobProgress], None]):
        self._job_idx = job_idx
        self._context_len = context_len
        self._on_progress = on_progress
        self._first_share: float | None = None

    def tell(self, progress: BuildProgress) -> None:
        if self._first_share is None:
            self._first_share = progress.layer_idx / progress.num_layers
        share = (progress.layer_idx + progress.done / progress.total) / progress.num_layers
        self._send(self._first_share, share, f"layer {progress.layer_idx + 1}/{progress.num_layers} {progress.phase}")

    def tell_waiting(self) -> None:
        self._send(0.0, 0.0, "waiting for another builder of it")

    def _send(self, first_share: float, share: float, where: str) -> None:
        self._on_progress(JobProgress(self._job_idx, self._context_len, first_share, share, where))
