"""The same batch over a Ray cluster: one task per context, begun again elsewhere when its worker or node dies.

Context files, models and the store lie where every node sees them, under the same paths. A task that is begun again
goes on at the layer where it stopped, and finds finished artifacts finished: the store sees to both.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from csattn.errors import ConfigError
from csattn.models import LoadedModel, load_model
from index_build.batch import BatchReport, JobProgress, JobResult, build_job, by_model, sentence
from index_build.inputs import DEVICES
from index_build.job_list import Job

MAX_ATTEMPTS = 5  # per job: nodes may be lent for minutes
MAX_DEFAULT_THREADS = 8  # larger nodes build several contexts at a time
NO_ROOM_S = 600.0  # how long a cluster may be without a node for a task
_CONNECT_S = 5.0
_POLL_S = 0.3
_TELL_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """What one task gets of its node."""

    device: str  # "cpu" or "cuda"
    num_threads: int

    @property
    def resources(self) -> dict[str, int]:
        return {"CPU": self.num_threads, **({"GPU": 1} if self.device == "cuda" else {})}

    def room(self, nodes: list[dict[str, float]]) -> int:
        """How many tasks run at once on nodes with these resources."""
        return sum(min(int(node.get(kind, 0) // count) for kind, count in self.resources.items()) for node in nodes)


def run_on_ray(
    jobs: Sequence[Job],
    store: Path,
    address: str = "auto",
    *,
    device: str = "auto",
    num_threads: int | None = None,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
    on_result: Callable[[JobResult], None] = lambda result: None,
) -> BatchReport:
    """Build all jobs on a cluster; whatever fails is in the report.

    address: of the cluster; `auto` finds the one this process belongs to, `local` starts one on this machine for as
    long as the batch takes. Where this process is connected already, that connection is used.
    num_threads: CPUs of each task. [default: one beside a GPU, else the smallest node's, at most 8]
    Raises ConfigError when there is no ray, no such cluster, or no node in it that a task fits on.
    """
    started = time.perf_counter()
    with _connected(address) as ray:
        needs = choose_needs(_nodes(ray), device, num_threads)
        dispatch = _Dispatch(ray, jobs, store.absolute(), needs, on_progress, on_result)
        results = dispatch.run()
    return BatchReport(tuple(results[idx] for idx in range(len(jobs))), time.perf_counter() - started)


def choose_needs(nodes: list[dict[str, float]], device: str, num_threads: int | None) -> TaskNeeds:
    """What each task asks of a cluster whose nodes have these resources."""
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, got {device!r}")
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {num_threads}")
    has_gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
    if device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda needs a node with a GPU, and the cluster has none; use cpu")
    if has_gpu and device != "cpu":
        needs = TaskNeeds("cuda", num_threads or 1)
    else:
        smallest = min((int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1), default=1)
        needs = TaskNeeds("cpu", num_threads or min(smallest, MAX_DEFAULT_THREADS))
    if not needs.room(nodes):
        wanted = " and ".join(f"{count} {kind}" for kind, count in needs.resources.items())
        raise ConfigError(f"no node of the cluster has {wanted} for a build; add one, or give fewer --threads")
    return needs


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module ray, connected; what this connected it also parts again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        _require_listener(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False, **here)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot reach a Ray cluster at {address!r} ({sentence(error)}); start one with `ray start --head`, "
            "or use --ray local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Knock at `host:port` before Ray does, which would go on knocking for many minutes."""
    if address not in ("auto", "local"):
        host, _, port = address.rpartition("://")[2].rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _nodes(ray: Any) -> list[dict[str, float]]:
    """The resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, slots=True)
class _Attempt:
    job_idx: int
    number: int  # from 1


class _Dispatch:
    """Keeps as many tasks in flight as the cluster has room for, and a few more, until every job has a result."""

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        store: Path,
        needs: TaskNeeds,
        on_progress: Callable[[JobProgress], None],
        on_result: Callable[[JobResult], None],
    ):
        self._ray, self._jobs, self._store, self._needs = ray, jobs, store, needs
        self._on_progress, self._on_result = on_progress, on_result
        # retries are counted here and not by Ray, which begins a task that needs too much memory again without end
        options: dict[str, Any] = {"num_cpus": needs.num_threads, "max_retries": 0}
        if needs.device == "cuda":
            options |= {"num_gpus": 1, "max_calls": 1}  # a process that has met one GPU cannot be given another
        self._task = ray.remote(**options)(_build_on_worker)
        self._board = ray.remote(_Board).options(num_cpus=0, max_restarts=-1).remote()
        self._news: Any = None  # what the board was asked for
        self._waiting = deque(_Attempt(idx, 1) for group in by_model(jobs) for idx in group)
        self._running: dict[Any, _Attempt] = {}
        self._results: dict[int, JobResult] = {}
        self._had_room = time.monotonic()

    def run(self) -> dict[int, JobResult]:
        try:
            while self._waiting or self._running:
                self._submit()
                done, _ = self._ray.wait(list(self._running), timeout=_POLL_S) if self._running else ([], [])
                self._pass_on_progress()
                for ref in done:
                    self._settle(ref, self._running.pop(ref))
        finally:
            for ref in self._running:
                with suppress(Exception):
                    self._ray.cancel(ref, force=True)
            with suppress(Exception):
                self._ray.kill(self._board)
        return self._results

    def _submit(self) -> None:
        room = self._needs.room(_nodes(self._ray))
        now = time.monotonic()
        self._had_room = now if room else self._had_room
        if now - self._had_room > NO_ROOM_S:
            self._give_up()
        while self._waiting and len(self._running) < room + 1:  # one waits on the cluster, lest a node wait for us
            attempt = self._waiting.popleft()
            arguments = (attempt.job_idx, self._jobs[attempt.job_idx], self._store, self._needs, self._board)
            self._running[self._task.remote(*arguments)] = attempt

    def _give_up(self) -> None:
        """Fail what is left."""
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        for attempt in [*self._running.values(), *self._waiting]:
            self._finish(attempt, self._failed(attempt, f"the cluster had no node for it for {NO_ROOM_S:.0f} s"))
        self._running.clear()
        self._waiting.clear()

    def _settle(self, ref: Any, attempt: _Attempt) -> None:
        """Take a task's result, or put its job back in front when its worker died."""
        try:
            result = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # not the worker's end: an error that building let through
            result = self._failed(attempt, sentence(error.cause))
        except self._ray.exceptions.RayError as error:
            if attempt.number < MAX_ATTEMPTS:
                self._waiting.appendleft(_Attempt(attempt.job_idx, attempt.number + 1))
                return
            result = self._failed(attempt, f"its worker died {MAX_ATTEMPTS} times, last of {sentence(error)}")
        self._finish(attempt, result)

    def _failed(self, attempt: _Attempt, error: str) -> JobResult:
        return JobResult(self._jobs[attempt.job_idx], "failed", 0.0, error=error)

    def _finish(self, attempt: _Attempt, result: JobResult) -> None:
        self._results[attempt.job_idx] = replace(result, attempts=attempt.number)
        self._on_result(self._results[attempt.job_idx])

    def _pass_on_progress(self) -> None:
        """Show what the board has. It may be on a node that dies: then news is lost, and nothing else."""
        if self._news is None:
            self._news = self._board.take.remote()
        if not self._ray.wait([self._news], timeout=0)[0]:
            return
        with suppress(self._ray.exceptions.RayError):
            for progress in self._ray.get(self._news):
                if progress.job_idx not in self._results:
                    self._on_progress(progress)
        self._news = None


class _Board:
    """An actor that keeps the latest progress of each job until it is asked for."""

    def __init__(self) -> None:
        self._latest: dict[int, JobProgress] = {}

    def tell(self, progress: JobProgress) -> None:
        self._latest[progress.job_idx] = progress

    def take(self) -> list[JobProgress]:
        latest, self._latest = list(self._latest.values()), {}
        return latest


def _build_on_worker(job_idx: int, job: Job, store: Path, needs: TaskNeeds, board: Any) -> JobResult:
    """The task: runs in a worker's process."""
    torch.set_num_threads(needs.num_threads)
    last_told = -_TELL_EVERY_S

    def tell(progress: JobProgress) -> None:
        nonlocal last_told
        if time.monotonic() - last_told >= _TELL_EVERY_S:
            last_told = time.monotonic()
            board.tell.remote(progress)

    try:
        loaded = _model(job.options.model, job.options.dtype, needs.device)
    except Exception as error:
        return JobResult(job, "failed", 0.0, error=sentence(error))
    return build_job(job_idx, job, loaded, store, num_threads=needs.num_threads, on_progress=tell)


@lru_cache(maxsize=1)
def _model(name: str | None, dtype: str, device: str) -> LoadedModel:
    """The model that this process loaded last: tasks of one model follow each other."""
    return load_model(name, dtype, device)
