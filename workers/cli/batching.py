"""`csattn build --jobs`: read the list, build it here or on a Ray cluster, show progress and outcomes."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csattn.artifact.durable import unsynced
from csattn.build_options import BuildOptions
from index_build.batch import OUTCOMES, BatchReport, JobResult, run_batch
from index_build.board import BuildState
from index_build.job_list import Job, read_jobs
from workers.capacity import require_room_for_weights
from workers.cli.building import use_threads
from workers.cli.terminal import Bar, err, out, print_json_to_stderr, table
from workers.cli.usage import UsageError
from workers.words import counted

HEARTBEAT_S = 15.0  # while there is progress, a line at least this often


def build_jobs(
    jobs_file: Path,
    defaults: BuildOptions,
    store: Path | str,
    ray_address: str | None,
    threads: int | None,
    device: str,
    progress: str,
    sync: bool,
) -> dict[str, Any]:
    """Build and return the command's JSON object. sync: artifacts survive a power failure."""
    jobs, started = read_jobs(jobs_file, defaults), time.perf_counter()
    if progress != "json":
        where = f" on the Ray cluster {ray_address}" if ray_address else ""
        err.print(f"{counted(len(jobs), 'context')} to build{where}", soft_wrap=True)
    finished: dict[int, JobResult] = {}
    with nullcontext(JsonBatchProgress(jobs)) if progress == "json" else BatchDisplay(jobs) as display:

        def on_result(idx: int, result: JobResult) -> None:
            finished[idx] = result
            display.on_result(idx, result)

        try:
            callbacks: Any = {"on_progress": display.on_progress, "on_result": on_result, "num_threads": threads}
            if ray_address is None:
                use_threads(threads)
                callbacks["require_room"] = lambda of: require_room_for_weights(of.model, of.dtype, of.weights)
                with nullcontext() if sync else unsynced():
                    report = run_batch(jobs, store, device=device, **callbacks)
            else:
                from index_build.jobs import run_on_ray

                report = run_on_ray(jobs, store, ray_address, device=device, **callbacks)
        except KeyboardInterrupt:
            results = tuple(finished[idx] for idx in sorted(finished))
            show_summary(BatchReport(results, time.perf_counter() - started))
            raise
    show_summary(report)
    return report.to_json()


def require_one_source(
    context: str | None, tokens_file: Path | None, jobs_file: Path | None, ray_address: str | None, sync: bool
) -> None:
    """Raise UsageError unless `build` has one context or one list; a cluster builds only lists, and always syncs."""
    if sum(source is not None for source in (context, tokens_file, jobs_file)) != 1:
        raise UsageError("build takes --context FILE, --tokens FILE or --jobs FILE; give one of them")
    if ray_address is not None and jobs_file is None:
        raise UsageError("--ray builds the contexts of a list; give --jobs FILE, or leave --ray out")
    if ray_address is not None and not sync:
        raise UsageError("--no-sync is for builds in this process; leave it out with --ray")


def show_summary(report: BatchReport) -> None:
    """Print a row per context, a line for each failure, and a line for all."""
    rows = []
    for result in report.results:
        rate = result.tokens_per_s
        rows.append(
            [
                result.job.context.name,
                result.outcome,
                result.artifact_id or "",
                f"{result.context_len:,}" if result.context_len else "",
                f"{result.seconds:.1f}",
                "" if rate is None else f"{rate:.0f}",
            ]
        )
    out.print(table("Contexts", ["context", "", "artifact", "tokens", "seconds", "tokens/s"], rows))
    for result in report.results:
        if result.error is not None:
            out.print(f"line {result.job.line}, {result.job.context.name}: {result.error}", soft_wrap=True)
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in OUTCOMES if report.count(outcome))
    out.print(f"{counts or 'nothing finished'}; {report.seconds:.1f} s in all")


@dataclass(frozen=True, slots=True)
class Totals:
    """The progress of the whole batch."""

    num_finished: int
    share: float  # of all contexts, by bytes
    tokens_per_s: float  # of what this run built
    left_s: float | None  # None until something was built


class BatchTotals:
    """Sums up the jobs. A context counts by its bytes, because its tokens are known only when its turn comes."""

    def __init__(self, jobs: Sequence[Job], now_s: float):
        self._weights = [job.context_bytes for job in jobs]
        self.whole, self.done = sum(self._weights), 0.0  # bytes; the latter up to rounding
        self._first = [0.0] * len(jobs)  # shares that this run did not have to build
        self._share = [0.0] * len(jobs)
        self._context_lens = [0] * len(jobs)
        self._started_s = now_s
        self._num_finished = 0

    def update(self, idx: int, progress: BuildState) -> None:
        self._context_lens[idx] = progress.context_len
        self._first[idx] = progress.first_share
        self._set_share(idx, progress.share)

    def finish(self, job_idx: int, result: JobResult) -> None:
        self._num_finished += 1
        self._context_lens[job_idx] = result.context_len or self._context_lens[job_idx]
        if result.outcome in ("reused", "failed"):  # nothing more will be built of it
            self._first[job_idx] += 1.0 - self._share[job_idx]
        self._set_share(job_idx, 1.0)

    def _set_share(self, idx: int, share: float) -> None:
        self.done += self._weights[idx] * (share - self._share[idx])
        self._share[idx] = share

    def totals(self, now_s: float) -> Totals:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        done = sum(weight * share for weight, share in zip(self._weights, self._share, strict=True))
        built = done - sum(weight * first for weight, first in zip(self._weights, self._first, strict=True))
        built_shares = (max(share - first, 0.0) for share, first in zip(self._share, self._first, strict=True))
        tokens = sum(num * share for num, share in zip(self._context_lens, built_shares, strict=True))
        left_s = elapsed_s * (self.whole - done) / built if built > 0 else 0.0 if done == self.whole else None
        return Totals(self._num_finished, done / self.whole, tokens / elapsed_s, left_s)


class JsonBatchProgress:
    """For programs: one JSON object per line on stderr, when a context has ended or another percent of all is done."""

    def __init__(self, jobs: Sequence[Job]):
        self._totals, self._num_jobs, self._reported_share = BatchTotals(jobs, time.monotonic()), len(jobs), 0.0

    def on_progress(self, idx: int, progress: BuildState) -> None:
        self._totals.update(idx, progress)
        if self._totals.done >= (self._reported_share + 0.01) * self._totals.whole:
            self._report()

    def on_result(self, idx: int, result: JobResult) -> None:
        self._totals.finish(idx, result)
        self._report(job=result.to_json())

    def _report(self, **more: object) -> None:
        now = self._totals.totals(time.monotonic())
        self._reported_share = now.share
        what = {"progress": round(now.share, 4), "finished": now.num_finished, "contexts": self._num_jobs}
        print_json_to_stderr({**what, **more})


class BatchDisplay(Bar):
    """A bar for all contexts, a line per result, and a line after HEARTBEAT_S without one."""

    def __init__(self, jobs: Sequence[Job], clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._jobs, self._clock = jobs, clock
        self._totals = BatchTotals(jobs, clock())
        self._last_line_s = clock()
        self._where: dict[int, str] = {}  # by job, for the jobs under way

    def on_progress(self, idx: int, progress: BuildState) -> None:
        self._totals.update(idx, progress)
        self._where[idx] = f"{self._jobs[idx].context.name} {progress.where}"
        self._show_line("; ".join(self._where.values()), self._clock() - self._last_line_s >= HEARTBEAT_S)

    def on_result(self, idx: int, result: JobResult) -> None:
        self._totals.finish(idx, result)
        self._where.pop(idx, None)
        what = f"failed: {result.error}" if result.error else f"{result.outcome} in {result.seconds:.1f} s"
        self._show_line(f"{result.job.context.name} {what}", True)

    def _show_line(self, what: str, as_line: bool) -> None:
        """Show a text and the totals on the bar and, if as_line, print them as a line."""
        now_s = self._clock()
        totals = self._totals.totals(now_s)
        left = "" if totals.left_s is None else f", {totals.left_s:.0f} s left"
        done = f"{totals.num_finished}/{len(self._jobs)} contexts, {100 * totals.share:.0f} %"
        line = f"{what} ({done}, {totals.tokens_per_s:.0f} tokens/s{left})"
        self.show(line, totals.share, 1.0)
        if as_line:
            self._last_line_s = now_s
            err.print(line, soft_wrap=True)
