"""Build a batch of contexts, one after another, in this process; the results and reports of any batch.

Each model is loaded once. Failed jobs do not stop the batch; they are reported at the end.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from csattn.build_options import BuildOptions
from csattn.errors import CsattnError
from csattn.models import LoadedModel, load_model
from csattn.models.quantized_model import drop_quantized
from index_build.board import BuildProgress, BuildState, Outcome
from index_build.inputs import choose_device, read_text, with_dtype
from index_build.job_list import Job
from index_build.pipeline import build_plan
from index_build.plan import Plan, plan_text

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of one job."""

    job: Job
    outcome: Outcome
    seconds: float
    artifact_id: str | None = None
    path: Path | str | None = None  # a str is a URL
    context_len: int = 0
    error: str | None = None  # a sentence if it failed
    attempts: int = 1  # more than 1 if workers died during the job
    num_built: int = 0  # layers built in this run

    @property
    def tokens_per_s(self) -> float | None:
        """Context tokens per second of the build; None unless this run built all layers."""
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


OnJobProgress = Callable[[int, BuildState], None]  # called with the job's index in the list
OnJobResult = Callable[[int, JobResult], None]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The results of all jobs, in the list's order."""

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
    """Build all jobs one after another, those of one model together; the report includes failures.

    require_room: called before a model is loaded; raises if memory has no room for it.
    """
    started = time.perf_counter()
    device = choose_device(device)
    results: dict[int, JobResult] = {}
    for group in by_model(jobs):
        results |= _run_group(jobs, group, store, device, num_threads, require_room, on_progress, on_result)
    return BatchReport(tuple(results[idx] for idx in range(len(jobs))), time.perf_counter() - started)


def by_model(jobs: Sequence[Job]) -> list[list[int]]:
    """Group the jobs' indices by model, in the order in which models first appear."""
    groups: dict[tuple[str | None, str, str | None], list[int]] = {}
    for idx, job in enumerate(jobs):
        groups.setdefault((job.options.model, job.options.dtype, job.options.weights), []).append(idx)
    return list(groups.values())


def plan_job(job: Job, loaded: LoadedModel) -> Plan:
    """Read the job's context and plan its artifact."""
    return plan_text(read_text(str(job.context)), job.context.name, job.options, loaded, loaded.device.type)


def sentence(error: Exception) -> str:
    """Format an error as one line; the project's own messages are sentences already."""
    lines = str(error).strip().splitlines()
    if isinstance(error, CsattnError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def model_for_builds(options: BuildOptions, device: str) -> LoadedModel:
    """Load a model as `load_model` does, without the low-bit copies of its weights: prefill uses the decoded ones."""
    loaded = load_model(options.model, options.dtype, device, weights=options.weights, may_offload=True)
    drop_quantized(loaded.model)
    return loaded


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
    """Build the jobs of one model, and free it afterwards. Jobs that another process builds come last."""
    loaded: LoadedModel | None = None
    fault = ""
    try:
        options = with_dtype(jobs[group[0]].options, device)
        require_room(options)
        loaded = model_for_builds(options, device)
    except Exception as error:
        fault = sentence(error)
    left: dict[int, Plan | None] = dict.fromkeys(group)
    for may_wait in (False, True):
        for idx, plan in list(left.items()):
            job, started = jobs[idx], time.perf_counter()
            try:
                if loaded is None:
                    result = JobResult(job, "failed", 0.0, error=fault)
                else:
                    left[idx] = plan = plan or plan_job(job, loaded)
                    on_state = partial(on_progress, idx)
                    result = build_job(job, loaded, plan, store, num_threads, on_state, may_wait)
            except BuiltElsewhereError:
                continue
            except Exception as error:  # a faulty context must not end the batch
                result = JobResult(job, "failed", time.perf_counter() - started, error=sentence(error))
            del left[idx]
            on_result(idx, result)
            yield idx, result


class BuiltElsewhereError(CsattnError):
    """Another process is building this artifact."""


def build_job(
    job: Job,
    loaded: LoadedModel,
    plan: Plan,
    store: Path | str,
    num_threads: int | None,
    on_state: Callable[[BuildState], None],
    may_wait: bool,
    **options: Any,  # of `build_plan`
) -> JobResult:
    """Build a job's context. If another process is building it, wait if `may_wait`, else raise BuiltElsewhereError."""
    started, context_len = time.perf_counter(), plan.spec.context_len
    first_share: float | None = None

    def show(progress: BuildProgress) -> None:
        nonlocal first_share
        first_share = progress.layer_idx / progress.num_layers if first_share is None else first_share
        where = f"layer {progress.layer_idx + 1}/{progress.num_layers} {progress.phase}"
        on_state(BuildState(context_len, first_share, progress.share, where))

    def wait() -> None:
        if not may_wait:
            raise BuiltElsewhereError
        on_state(BuildState(context_len, 0.0, 0.0, "waiting for another process that builds it"))

    report = build_plan(loaded, plan, store, on_progress=show, on_wait=wait, num_threads=num_threads, **options)
    num_built = 0 if report.reused else plan.spec.model.num_layers - report.resumed_at
    seconds = time.perf_counter() - started
    return JobResult(job, report.outcome, seconds, report.artifact_id, report.place, context_len, num_built=num_built)
