"""Build a batch of contexts on a Ray cluster, each in one process. The processes are reused and keep their model.

Context files, models and the store must be visible on every node under the same paths. Finished layers are files in the
store and are not built again: a task whose worker or node died is restarted elsewhere, and an interrupted batch resumes
where it stopped.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from csattn.artifact import cache_store, local_path, remote_store
from csattn.artifact.durable import make_store, store_errors
from csattn.cluster import join
from csattn.errors import ConfigError, CsattnError
from index_build.batch import (
    BatchReport,
    BuiltElsewhereError,
    JobResult,
    OnJobProgress,
    OnJobResult,
    by_model,
    sentence,
)
from index_build.board import Board
from index_build.job_list import Job
from index_build.needs import TaskNeeds, choose_needs
from index_build.tasks import Builder, upload

NO_ROOM_S = 600.0  # how long a cluster may have no node for a task before the batch fails
_POLL_S = 0.1
_MAX_LOST = 20  # consecutive processes that may die while starting
MAX_ATTEMPTS = 5  # of a job from one starting layer: nodes may be lent for only minutes


def run_on_ray(
    jobs: Sequence[Job],
    store: Path | str,
    address: str = "auto",
    *,
    device: str = "auto",
    num_threads: int | None = None,
    on_progress: OnJobProgress = lambda job_idx, state: None,
    on_result: OnJobResult = lambda job_idx, result: None,
) -> BatchReport:
    """Build all jobs on a cluster; the report includes failures.

    address: of the cluster; `auto` finds the one this process belongs to, `local` starts one on this machine for the
    duration of the batch. If this process is connected already, that connection is used.
    num_threads: CPUs of each task. Default: all of the smallest node, for a GPU its share of the node's, at most 8.
    Raises ConfigError if ray is not installed, if the cluster cannot be reached, or if no node fits a task, and
    SystemExit with code 143 for a SIGTERM that arrives while Ray starts, which Ray's own handler takes.
    """
    started = time.perf_counter()
    with _connected(address) as ray:
        needs = choose_needs(_nodes(ray), device, num_threads)
        remote = remote_store(store)
        here = local_path(store).absolute() if remote is None else cache_store()
        make_store(here)
        with store_errors(f"make a file in {here}", here):
            marker = NamedTemporaryFile(dir=here, prefix=".batch-")  # noqa: SIM115  # its errors alone are the store's
        with marker:
            place = here if remote is None else remote.url
            results = _Dispatch(ray, jobs, place, Path(marker.name), needs, on_progress, on_result).run()
    return BatchReport(results, time.perf_counter() - started)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield the module ray, connected to the cluster; disconnect afterwards if this connected it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # its ports are reachable from the network
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--ray needs the package ray, which is not installed; run `pip install 'csattn[serve]'`, or leave --ray "
            "out to build in this process"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    here = {"include_dashboard": False} if address == "local" else {}
    try:
        join(ray, address, address=address, **here)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot reach a Ray cluster at {address!r} ({sentence(error)}); start one with `ray start --head`, "
            "or use --ray local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _nodes(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass(slots=True)
class _Build:
    """The state of one job."""

    job: Job
    is_built_elsewhere: bool = False  # another process was building it
    started_s: float | None = None
    first_share: float = 0.0  # the share that was done when its task began
    losses: Counter[float] = field(default_factory=Counter)  # dead workers, by the `first_share` of their task
    num_restarts: int = 0  # restarts after a worker's death
    built: JobResult | None = None  # built, and being uploaded to a URL
    result: JobResult | None = None


class _Dispatch:
    """Keeps as many builds in flight as the cluster has room for, until every job has ended.

    Jobs of one model are started one after another; those that another process builds come last.
    """

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        store: Path | str,
        marker: Path,  # see `Builder.run_job`
        needs: TaskNeeds,
        on_progress: OnJobProgress,
        on_result: OnJobResult,
    ):
        self._ray, self._store, self._marker, self._needs = ray, store, marker, needs
        self._on_progress, self._on_result = on_progress, on_result
        self._board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
        self._news: Any = None  # the pending reply of the board
        self._builds = [_Build(job) for job in jobs]
        self._waiting = [idx for group in by_model(jobs) for idx in group]
        # Retries are counted here and not by Ray, which restarts a task that runs out of memory without end.
        self._upload = ray.remote(num_cpus=0, max_retries=0)(upload).remote
        self._running: dict[Any, int] = {}  # jobs, by the ref of their build or upload
        self._builders = _Builders(ray, needs)
        self._had_room = time.monotonic()

    def run(self) -> tuple[JobResult, ...]:
        try:
            while self._waiting or self._running:
                self._submit()
                for ref in self._wait():
                    self._finish_task(ref)
                self._pass_on_progress()
        finally:
            for ref in self._running:
                self._cancel(ref)
            self._builders.end()
            with suppress(Exception):
                self._ray.kill(self._board)
        return tuple(build.result for build in self._builds if build.result is not None)

    def _wait(self) -> list[Any]:
        """Wait until a task ends or a process has started, at most _POLL_S; return the refs of tasks that ended."""
        refs = [*self._running, *self._builders.starting]
        if not refs:
            time.sleep(_POLL_S)
            return []
        return [ref for ref in self._ray.wait(refs, timeout=_POLL_S)[0] if ref in self._running]

    def _submit(self) -> None:
        room, now = self._needs.room(_nodes(self._ray)), time.monotonic()
        self._had_room = now if room else self._had_room
        if now - self._had_room > NO_ROOM_S:
            self._give_up(f"the cluster had no node with room for it for {NO_ROOM_S:.0f} s")
        num_builds = sum(self._builds[idx].built is None for idx in self._running.values())
        self._builders.update(min(room, num_builds + len(self._waiting)))
        if self._builders.start_error:
            self._give_up(f"build processes die as they start; the last one: {self._builders.start_error}")
        while self._waiting and self._builders.has_idle:
            self._start(self._waiting.pop(0))

    def _start(self, job_idx: int) -> None:
        build, needs = self._builds[job_idx], self._needs
        if build.started_s is None:
            build.started_s = time.monotonic()
        where = self._store, self._marker, needs.device, needs.num_threads
        ref = self._builders.run_job(build.job, *where, job_idx, build.is_built_elsewhere, self._board)
        self._running[ref] = job_idx

    def _cancel(self, ref: Any) -> None:
        with suppress(Exception):  # it may have ended, or been cancelled before
            if not self._builders.drop(ref):
                self._ray.cancel(ref, force=True)

    def _give_up(self, reason: str) -> None:
        """Fail all jobs that have not ended."""
        for ref in self._running:
            self._cancel(ref)
        left, self._running, self._waiting = [*self._running.values(), *self._waiting], {}, []
        for job_idx in left:
            self._fail(job_idx, reason)

    def _finish_task(self, ref: Any) -> None:
        """Take a task's result, or restart it if its worker died."""
        job_idx = self._running.pop(ref)
        build, (value, died) = self._builds[job_idx], self._outcome_of(ref)
        self._builders.release(ref, value, died)
        if isinstance(value, BuiltElsewhereError):
            build.is_built_elsewhere = True
            self._waiting.append(job_idx)
        elif died:
            build.losses[build.first_share] += 1
            if build.losses[build.first_share] >= MAX_ATTEMPTS:
                self._fail(job_idx, f"its worker died {MAX_ATTEMPTS} times; the last time: {sentence(value)}")
                return
            build.num_restarts += 1
            if build.built is not None:
                self._start_upload(job_idx, build.built)
            else:
                self._waiting.insert(0, job_idx)
        elif isinstance(value, Exception):
            self._fail(job_idx, sentence(value))
        elif build.built is not None:  # and has been uploaded
            self._end(job_idx, build.built)
        elif isinstance(self._store, Path):
            self._end(job_idx, value)
        else:
            build.built = value
            self._start_upload(job_idx, value)

    def _start_upload(self, job_idx: int, built: JobResult) -> None:
        artifact = self._marker.parent / str(built.artifact_id)
        self._running[self._upload(self._store, artifact)] = job_idx

    def _outcome_of(self, ref: Any) -> tuple[Any, bool]:
        """Return a task's result or its error, and whether the error is the death of its worker."""
        try:
            return self._ray.get(ref), False
        except self._ray.exceptions.RayTaskError as error:
            return error.cause, False
        except self._ray.exceptions.RayError as error:
            return error, True

    def _fail(self, job_idx: int, reason: str) -> None:
        self._end(job_idx, JobResult(self._builds[job_idx].job, "failed", 0.0, error=reason))

    def _end(self, job_idx: int, result: JobResult) -> None:
        build, now = self._builds[job_idx], time.monotonic()
        seconds = 0.0 if build.started_s is None else now - build.started_s
        build.result = replace(result, seconds=seconds, attempts=1 + build.num_restarts)
        self._on_result(job_idx, build.result)

    def _pass_on_progress(self) -> None:
        """Report progress from the board, which may be on a node that dies."""
        if self._news is None:
            self._news = self._board.take.remote()
        if self._ray.wait([self._news], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                for job_idx, state in self._ray.get(self._news).items():
                    if self._builds[job_idx].result is None:
                        self._builds[job_idx].first_share = state.first_share
                        self._on_progress(job_idx, state)
            self._news = None


class _Builders:
    """A pool of actors that have a GPU or CPUs each. Only those that have answered `ready` are given jobs."""

    def __init__(self, ray: Any, needs: TaskNeeds):
        self._ray = ray
        on_gpu = needs.device == "cuda"
        self._make = ray.remote(num_gpus=int(on_gpu), num_cpus=0 if on_gpu else needs.num_threads)(Builder).remote
        self.starting: dict[Any, Any] = {}  # actors that are starting, by the ref of their answer
        self.start_error = ""  # the last error, after _MAX_LOST consecutive actors died while starting
        self._num_lost = 0  # consecutive actors that died while starting
        self._idle: list[Any] = []
        self._busy: dict[Any, Any] = {}  # by the ref of their job

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def update(self, num_wanted: int) -> None:
        """Collect actors that have started; then start missing ones, or end idle ones beyond `num_wanted`."""
        for ref in (
            self._ray.wait(list(self.starting), num_returns=len(self.starting), timeout=0)[0] if self.starting else []
        ):
            builder = self.starting.pop(ref)
            try:
                self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                self._num_lost += 1
                self.start_error = sentence(error) if self._num_lost >= _MAX_LOST else ""
            else:
                self._num_lost = 0
                self._idle.append(builder)
        num_missing = num_wanted - len(self.starting) - len(self._idle) - len(self._busy)
        for _ in range(num_missing):
            builder = self._make()
            self.starting[builder.ready.remote()] = builder
        for builder in self._idle[: max(0, -num_missing)]:
            self._idle.remove(builder)
            self._ray.kill(builder)

    def run_job(self, *arguments: Any) -> Any:
        builder = self._idle.pop()
        ref = builder.run_job.remote(*arguments)
        self._busy[ref] = builder
        return ref

    def release(self, ref: Any, value: Any, died: bool) -> None:
        """Keep an actor after a result or an error of csattn; any other may have broken its CUDA context for good."""
        builder = self._busy.pop(ref, None)
        if builder is None:
            return
        if died:  # if its node died, so did others: each would cost a job an attempt
            for other in self._idle:
                self._ray.kill(other)
            self._idle.clear()
        elif isinstance(value, Exception) and not isinstance(value, CsattnError):
            self._ray.kill(builder)
        else:
            self._idle.append(builder)

    def drop(self, ref: Any) -> bool:
        """Kill the actor that runs this job; return whether there was one."""
        builder = self._busy.pop(ref, None)
        if builder is not None:
            self._ray.kill(builder)
        return builder is not None

    def end(self) -> None:
        for builder in (*self.starting.values(), *self._idle, *self._busy.values()):
            with suppress(Exception):
                self._ray.kill(builder)
