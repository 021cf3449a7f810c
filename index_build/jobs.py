"""Many contexts over a Ray cluster, each built by one process; these stay, and keep their model.

Context files, models and the store lie where every node sees them, under the same paths. Finished layers are files in
the store, and what is there is not made again: a task whose worker or node died is begun again elsewhere, a batch that
was interrupted goes on where it stopped.
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
from csattn.artifact.durable import store_errors
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

NO_ROOM_S = 600.0  # how long a cluster may be without a node for a task
_POLL_S = 0.1
_MOST_LOST = 20  # processes, in a row
MAX_ATTEMPTS = 5  # from where a build begins: nodes may be lent for minutes


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
    """Build all jobs on a cluster; whatever fails is in the report.

    address: of the cluster; `auto` finds the one this process belongs to, `local` starts one on this machine for as
    long as the batch takes. Where this process is connected already, that connection is used.
    num_threads: CPUs of each task. [default: the smallest node's, on a GPU its share of them, at most 8]
    Raises ConfigError when there is no ray, no such cluster, or no node in it that a task fits on, and SystemExit with
    code 143 for a SIGTERM that comes while Ray starts, which takes it for itself.
    """
    started = time.perf_counter()
    with _connected(address) as ray:
        needs = choose_needs(_nodes(ray), device, num_threads)
        remote = remote_store(store)
        here = local_path(store).absolute() if remote is None else cache_store()
        with store_errors(f"make {here}", here):
            here.mkdir(parents=True, exist_ok=True)
            marker = NamedTemporaryFile(dir=here, prefix=".batch-")  # noqa: SIM115  # its errors alone are the store's
        with marker:
            place = here if remote is None else remote.url
            results = _Dispatch(ray, jobs, place, Path(marker.name), needs, on_progress, on_result).run()
    return BatchReport(results, time.perf_counter() - started)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module ray, connected; what this connected it also parts again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # its ports are open to the network
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
    """The resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass(slots=True)
class _Build:
    """What is known of one job."""

    job: Job
    is_elsewhere: bool = False  # another process was building it
    started_s: float | None = None
    begun: float = 0.0  # the share of the context that was there when its task began
    losses: Counter[float] = field(default_factory=Counter)  # of workers, by where they had begun
    num_again: int = 0  # how often it was begun again for a lost worker
    made: JobResult | None = None  # on its way to a URL
    result: JobResult | None = None


class _Dispatch:
    """Keeps as many builds in flight as the cluster has room for, until every job ended.

    Those of one model follow each other; last come those that another process builds.
    """

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        store: Path | str,
        marker: Path,  # see `run_job`
        needs: TaskNeeds,
        on_progress: OnJobProgress,
        on_result: OnJobResult,
    ):
        self._ray, self._store, self._marker, self._needs = ray, store, marker, needs
        self._on_progress, self._on_result = on_progress, on_result
        self._board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
        self._news: Any = None  # what the board was asked for
        self._builds = [_Build(job) for job in jobs]
        self._waiting = [idx for group in by_model(jobs) for idx in group]
        # Retries are counted here and not by Ray, which begins a task that needs too much memory again without end.
        self._upload = ray.remote(num_cpus=0, max_retries=0)(upload).remote
        self._running: dict[Any, int] = {}  # jobs, by what is running
        self._builders = _Builders(ray, needs)
        self._had_room = time.monotonic()

    def run(self) -> tuple[JobResult, ...]:
        try:
            while self._waiting or self._running:
                self._submit()
                for ref in self._wait():
                    self._settle(ref)
                self._pass_on_progress()
        finally:
            for ref in self._running:
                self._cancel(ref)
            self._builders.end()
            with suppress(Exception):
                self._ray.kill(self._board)
        return tuple(build.result for build in self._builds if build.result is not None)

    def _wait(self) -> list[Any]:
        """What has ended, as soon as there is something or a process is there, or after a while."""
        refs = [*self._running, *self._builders.asked]
        if not refs:
            time.sleep(_POLL_S)
            return []
        return [ref for ref in self._ray.wait(refs, timeout=_POLL_S)[0] if ref in self._running]

    def _submit(self) -> None:
        room, now = self._needs.room(_nodes(self._ray)), time.monotonic()
        self._had_room = now if room else self._had_room
        if now - self._had_room > NO_ROOM_S:
            self._give_up(f"the cluster had no node with room for it for {NO_ROOM_S:.0f} s")
        num_builds = sum(self._builds[idx].made is None for idx in self._running.values())
        self._builders.look(min(room, num_builds + len(self._waiting)))
        if self._builders.why_lost:
            self._give_up(f"build processes die as they start; the last one: {self._builders.why_lost}")
        while self._waiting and self._builders.has_idle:
            self._start(self._waiting.pop(0))

    def _start(self, job_idx: int) -> None:
        build, needs = self._builds[job_idx], self._needs
        if build.started_s is None:
            build.started_s = time.monotonic()
        where = self._store, self._marker, needs.device, needs.num_threads
        ref = self._builders.run_job(build.job, *where, job_idx, build.is_elsewhere, self._board)
        self._running[ref] = job_idx

    def _cancel(self, ref: Any) -> None:
        with suppress(Exception):  # it may have ended, or been cancelled before
            if not self._builders.drop(ref):
                self._ray.cancel(ref, force=True)

    def _give_up(self, reason: str) -> None:
        """Fail what is left."""
        for ref in self._running:
            self._cancel(ref)
        left, self._running, self._waiting = [*self._running.values(), *self._waiting], {}, []
        for job_idx in left:
            self._fail(job_idx, reason)

    def _settle(self, ref: Any) -> None:
        """Take a result, or have it done again when its worker died."""
        job_idx = self._running.pop(ref)
        build, (value, died) = self._builds[job_idx], self._outcome_of(ref)
        self._builders.settle(ref, value, died)
        if isinstance(value, BuiltElsewhereError):
            build.is_elsewhere = True
            self._waiting.append(job_idx)
        elif died:
            build.losses[build.begun] += 1
            if build.losses[build.begun] >= MAX_ATTEMPTS:
                self._fail(job_idx, f"its worker died {MAX_ATTEMPTS} times; the last time: {sentence(value)}")
                return
            build.num_again += 1
            if build.made is not None:
                self._start_upload(job_idx, build.made)
            else:
                self._waiting.insert(0, job_idx)
        elif isinstance(value, Exception):
            self._fail(job_idx, sentence(value))
        elif build.made is not None:  # and has been uploaded
            self._end(job_idx, build.made)
        elif isinstance(self._store, Path):
            self._end(job_idx, value)
        else:
            build.made = value
            self._start_upload(job_idx, value)

    def _start_upload(self, job_idx: int, made: JobResult) -> None:
        artifact = self._marker.parent / str(made.artifact_id)
        self._running[self._upload(self._store, artifact)] = job_idx

    def _outcome_of(self, ref: Any) -> tuple[Any, bool]:
        """What a task returned or what it ran into, and whether that was its worker's end."""
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
        build.result = replace(result, seconds=seconds, attempts=1 + build.num_again)
        self._on_result(job_idx, build.result)

    def _pass_on_progress(self) -> None:
        """Show how far contexts are, of which the board knows; it may be on a node that dies."""
        if self._news is None:
            self._news = self._board.take.remote()
        if self._ray.wait([self._news], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                for job_idx, state in self._ray.get(self._news).items():
                    if self._builds[job_idx].result is None:
                        self._builds[job_idx].begun = state.first_share
                        self._on_progress(job_idx, state)
            self._news = None


class _Builders:
    """Actors that have a GPU each, or CPUs. Only those that have said that they are there get something to do."""

    def __init__(self, ray: Any, needs: TaskNeeds):
        self._ray = ray
        on_gpu = needs.device == "cuda"
        self._make = ray.remote(num_gpus=int(on_gpu), num_cpus=0 if on_gpu else needs.num_threads)(Builder).remote
        self.asked: dict[Any, Any] = {}  # actors that have not answered yet, by their answer
        self.why_lost = ""  # when too many were
        self._num_lost = 0  # in a row, before they answered
        self._idle: list[Any] = []
        self._busy: dict[Any, Any] = {}  # by what is running

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def look(self, num_wanted: int) -> None:
        """See who is there; start actors until there are as many, or end those that are idle beyond."""
        for ref in self._ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0)[0] if self.asked else []:
            builder = self.asked.pop(ref)
            try:
                self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                self._num_lost += 1
                self.why_lost = sentence(error) if self._num_lost >= _MOST_LOST else ""
            else:
                self._num_lost = 0
                self._idle.append(builder)
        num_missing = num_wanted - len(self.asked) - len(self._idle) - len(self._busy)
        for _ in range(num_missing):
            builder = self._make()
            self.asked[builder.ready.remote()] = builder
        for builder in self._idle[: max(0, -num_missing)]:
            self._idle.remove(builder)
            self._ray.kill(builder)

    def run_job(self, *arguments: Any) -> Any:
        builder = self._idle.pop()
        ref = builder.run_job.remote(*arguments)
        self._busy[ref] = builder
        return ref

    def settle(self, ref: Any, value: Any, died: bool) -> None:
        """Keep an actor that did what it should; what else it ran into may have broken its GPU's context for good."""
        builder = self._busy.pop(ref, None)
        if builder is None:
            return
        if died:  # and others with it, if it was a node: they would each cost a context an attempt
            for other in self._idle:
                self._ray.kill(other)
            self._idle.clear()
        elif isinstance(value, Exception) and not isinstance(value, CsattnError):
            self._ray.kill(builder)
        else:
            self._idle.append(builder)

    def drop(self, ref: Any) -> bool:
        """End the actor that is busy with it, if there is one."""
        builder = self._busy.pop(ref, None)
        if builder is not None:
            self._ray.kill(builder)
        return builder is not None

    def end(self) -> None:
        for builder in (*self.asked.values(), *self._idle, *self._busy.values()):
            with suppress(Exception):
                self._ray.kill(builder)
