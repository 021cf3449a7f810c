"""How far a batch of builds is: each context that is being built, and all of them, with rate and time left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from index_build.batch import JobResult
from index_build.context_build import BuildState
from index_build.job_list import Job
from workers.cli.terminal import err

HEARTBEAT_S = 15.0  # without a terminal, a line at least this often


@dataclass(frozen=True, slots=True)
class Totals:
    """Where the whole batch is."""

    num_finished: int
    share: float  # of all contexts, by bytes
    tokens_per_s: float  # of what this run built
    left_s: float | None  # None as long as nothing was built


class BatchTotals:
    """Adds the jobs up. A context counts by its bytes: its tokens are known only when its turn comes."""

    def __init__(self, jobs: Sequence[Job], now_s: float):
        self._weights = [job.context_bytes for job in jobs]
        self._first = [0.0] * len(jobs)  # shares that this run did not have to build
        self._share = [0.0] * len(jobs)
        self._context_lens = [0] * len(jobs)
        self._job_started_s = [now_s] * len(jobs)
        self._started_s = now_s
        self._num_finished = 0

    def update(self, idx: int, progress: BuildState, now_s: float) -> float:
        """Take a job's progress in, and return its own rate in tokens/s."""
        if not self._context_lens[idx]:
            self._context_lens[idx], self._job_started_s[idx] = progress.context_len, now_s
        self._first[idx], self._share[idx] = progress.first_share, progress.share
        return self._built(idx) / max(now_s - self._job_started_s[idx], 1e-9)

    def left_s(self, job_idx: int, now_s: float) -> float | None:
        """How long the job will take from now on; None as long as nothing of it was built."""
        built = self._share[job_idx] - self._first[job_idx]
        return (now_s - self._job_started_s[job_idx]) * (1.0 - self._share[job_idx]) / built if built > 0 else None

    def finish(self, job_idx: int, result: JobResult) -> None:
        self._num_finished += 1
        self._context_lens[job_idx] = result.context_len or self._context_lens[job_idx]
        if result.outcome in ("reused", "failed"):  # nothing more will be built of it
            self._first[job_idx] += 1.0 - self._share[job_idx]
        self._share[job_idx] = 1.0

    def totals(self, now_s: float) -> Totals:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        done = sum(weight * share for weight, share in zip(self._weights, self._share, strict=True))
        built = done - sum(weight * first for weight, first in zip(self._weights, self._first, strict=True))
        whole = sum(self._weights)
        tokens = sum(self._built(idx) for idx in range(len(self._share)))
        left_s = elapsed_s * (whole - done) / built if built > 0 else 0.0 if done == whole else None
        return Totals(self._num_finished, done / whole, tokens / elapsed_s, left_s)

    def _built(self, job_idx: int) -> float:
        """Tokens of that job that this run has built."""
        return self._context_lens[job_idx] * max(self._share[job_idx] - self._first[job_idx], 0.0)


class BatchDisplay:
    """A bar per context in work and one for all; without a terminal a line per result, and one now and then."""

    def __init__(self, jobs: Sequence[Job], clock: Callable[[], float] = time.monotonic):
        self._jobs, self._clock = jobs, clock
        self._totals = BatchTotals(jobs, clock())
        self._last_line_s = clock()
        self._where: dict[int, str] = {}  # of the jobs in work
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
        )
        self._bars = Progress(*columns, console=err, disable=not err.is_terminal)
        self._all = self._bars.add_task(f"all {len(jobs)} contexts", total=1.0, rate="")
        self._tasks: dict[int, TaskID] = {}

    def __enter__(self) -> "BatchDisplay":
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def on_progress(self, idx: int, progress: BuildState) -> None:
        now_s = self._clock()
        rate = self._totals.update(idx, progress, now_s)
        speed = _speed(rate, self._totals.left_s(idx, now_s))
        self._where[idx] = f"{self._jobs[idx].context.name} {progress.where}, {speed}"
        if idx not in self._tasks:
            self._tasks[idx] = self._bars.add_task("", total=1.0, rate="")
        name = f"{self._jobs[idx].context.name} {progress.where}"
        self._bars.update(self._tasks[idx], description=name, completed=progress.share, rate=speed)
        self._show_all()
        if now_s - self._last_line_s >= HEARTBEAT_S:
            self._line("; ".join(self._where.values()))

    def on_result(self, idx: int, result: JobResult) -> None:
        self._totals.finish(idx, result)
        self._where.pop(idx, None)
        if idx in self._tasks:
            self._bars.remove_task(self._tasks.pop(idx))
        self._show_all()
        what = f"failed: {result.error}" if result.error else f"{result.outcome} in {result.seconds:.1f} s"
        if err.is_terminal:
            err.print(f"{result.job.context.name} {what}")
        else:
            self._line(f"{result.job.context.name} {what}")

    def _show_all(self) -> None:
        totals = self._totals.totals(self._clock())
        self._bars.update(
            self._all, completed=totals.share, rate=_speed(totals.tokens_per_s, totals.left_s), refresh=True
        )

    def _line(self, what: str) -> None:
        if not err.is_terminal:
            now_s = self._last_line_s = self._clock()
            totals = self._totals.totals(now_s)
            done = f"{totals.num_finished}/{len(self._jobs)} contexts, {100 * totals.share:.0f} %"
            err.print(f"{what} ({done}, {_speed(totals.tokens_per_s, totals.left_s)})", soft_wrap=True)


def _speed(tokens_per_s: float, left_s: float | None) -> str:
    return f"{tokens_per_s:.0f} tokens/s" + ("" if left_s is None else f", {left_s:.0f} s left")
