"""Many contexts in one go: what becomes of each, and building them one after the other in this process.

A model is loaded once. Failed jobs do not stop the batch; they are reported at the end.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from csattn.build_options import BuildOptions
from csattn.errors import CsattnError
from csattn.models import LoadedModel, load_model
from index_build.board import BuildProgress
from index_build.context_build import BuildState, ContextBuild, Outcome
from index_build.inputs import choose_device, read_text
from index_build.job_list import Job
from index_build.pieces import Piece
from index_build.pipeline import run_here
from index_build.plan import Plan, plan_text

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


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
    num_built: int = 0  # layers, in this run

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
            "prefilled_layers": self.num_built,
            "indexed_layers": self.num_built,
            "error": self.error,
        }


OnJobProgress = Callable[[int, BuildState], None]  # by the job's position in the list
OnJobResult = Callable[[int, JobResult], None]


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
    require_room: Callable[[BuildOptions], object] = lambda options: None,
    on_progress: OnJobProgress = lambda job_idx, state: None,
    on_result: OnJobResult = lambda job_idx, result: None,
) -> BatchReport:
    """Build all jobs one after the other, those of one model together; whatever fails is in the report.

    require_room: called before a model is loaded; raises where memory has no room for it.
    """
    started = time.perf_counter()
    device = choose_device(device)
    results: dict[int, JobResult] = {}
    for group in by_model(jobs):
        results |= _run_group(jobs, group, store, device, num_threads, require_room, on_progress, on_result)
    return BatchReport(tuple(results[idx] for idx in range(len(jobs))), time.perf_counter() - started)


def by_model(jobs: Sequence[Job]) -> list[list[int]]:
    """The positions of the jobs of each model, in the order in which models first appear."""
    groups: dict[tuple[str | None, str, str | None], list[int]] = {}
    for idx, job in enumerate(jobs):
        groups.setdefault((job.options.model, job.options.dtype, job.options.weights), []).append(idx)
    return list(groups.values())


def result_of(job: Job, build: ContextBuild) -> JobResult:
    """What became of a job whose build has its outcome."""
    assert build.outcome is not None
    artifact_id = build.artifact_id
    path = None if artifact_id is None else build.url or build.store / artifact_id
    return JobResult(
        job,
        build.outcome,
        build.seconds,
        artifact_id,
        path,
        0 if build.plan is None else build.plan.spec.context_len,
        build.error,
        build.attempts,
        build.num_built,
    )


@contextmanager
def failing(build: ContextBuild) -> Iterator[None]:
    """An error becomes the build's outcome: one context must not end the others, whatever is wrong with it."""
    try:
        yield
    except Exception as error:
        build.fail(sentence(error))


def plan_job(job: Job, loaded: LoadedModel) -> Plan:
    """Read the job's context."""
    return plan_text(read_text(str(job.context)), job.context.name, job.options, loaded, loaded.device.type)


def sentence(error: Exception) -> str:
    """An error on one line; the project's own are sentences already."""
    lines = str(error).strip().splitlines()
    if isinstance(error, CsattnError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _run_group(
    jobs: Sequence[Job],
    group: list[int],
    store: Path | str,
    device: str,
    num_threads: int | None,
    require_room: Callable[[BuildOptions], object],
    on_progress: OnJobProgress,
    on_result: OnJobResult,
) -> Iterator[tuple[int, JobResult]]:
    """Build the jobs of one model, which is gone from memory afterwards; last, those that another process builds."""
    options = jobs[group[0]].options
    loaded: LoadedModel | None = None
    fault = ""
    try:
        require_room(options)
        loaded = load_model(options.model, options.dtype, device, weights=options.weights, may_lend=True)
    except Exception as error:
        fault = sentence(error)
    left: dict[int, Plan | None] = dict.fromkeys(group)
    for may_wait in (False, True):
        for idx, plan in list(left.items()):
            build = ContextBuild(store, plan)
            if loaded is None:
                build.fail(fault)
            else:
                with failing(build):
                    _build_job(idx, jobs[idx], build, loaded, num_threads, on_progress, may_wait)
            if build.outcome is None:
                left[idx] = build.plan
                continue
            del left[idx]
            result = result_of(jobs[idx], build)
            on_result(idx, result)
            yield idx, result


class _BuiltElsewhereError(Exception):
    """Another process is building this artifact."""


def _build_job(
    job_idx: int,
    job: Job,
    build: ContextBuild,
    loaded: LoadedModel,
    num_threads: int | None,
    on_progress: OnJobProgress,
    may_wait: bool,
) -> None:
    """Without an outcome where another process builds it, unless this may wait for that."""

    def show(progress: BuildProgress | None = None) -> None:
        if progress is not None:
            build.show(progress)
        state = build.progress
        assert state is not None
        on_progress(job_idx, state)

    def wait() -> None:
        if not may_wait:
            raise _BuiltElsewhereError
        show()

    if build.plan is None:
        build.start(plan := Piece("plan"))
        build.settle(plan, plan_job(job, loaded))
    with suppress(_BuiltElsewhereError):
        run_here(build, loaded, show, wait, num_threads)
