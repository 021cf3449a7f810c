"""Many contexts over a Ray cluster, each built by one process: on a GPU one that stays, or a task on CPUs.

Context files, models and the store lie where every node sees them, under the same paths. Finished layers are files in
the store, and what is there is not made again: a task whose worker or node died is begun again elsewhere, a batch that
was interrupted goes on where it stopped.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from csattn.artifact import local_path, remote_store
from csattn.cluster import join
from csattn.errors import ConfigError, CsattnError
from index_build.batch import BatchReport, OnJobProgress, OnJobResult, by_model, failing, result_of, sentence
from index_build.board import Board
from index_build.context_build import ContextBuild
from index_build.job_list import Job
from index_build.needs import TaskNeeds, choose_needs
from index_build.pieces import Piece
from index_build.tasks import GpuBuilder, run_piece

NO_ROOM_S = 600.0  # how long a cluster may be without a node for a task
_POLL_S = 0.1
_MOST_LOST = 20  # processes on GPUs, in a row


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
        place = store if remote_store(store) is not None else local_path(store).absolute()
        builds = {idx: ContextBuild(place) for group in by_model(jobs) for idx in group}
        _Dispatch(ray, jobs, builds, needs, on_progress, on_result).run()
    results = tuple(result_of(job, builds[idx]) for idx, job in enumerate(jobs))
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


class _Dispatch:
    """Keeps as many tasks in flight as the cluster has room for, and one more on CPUs, until every build ended.

    Contexts are opened in their order, and those that were opened first are finished first.
    """

    def __init__(
        self,
        ray: Any,
        jobs: Sequence[Job],
        builds: dict[int, ContextBuild],  # by job, in the order in which they are opened
        needs: TaskNeeds,
        on_progress: OnJobProgress,
        on_result: OnJobResult,
    ):
        self._ray, self._jobs, self._needs = ray, jobs, needs
        self._on_progress, self._on_result = on_progress, on_result
        self._board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
        self._news: Any = None  # what the board was asked for
        self._waiting = dict(builds)
        self._open: dict[int, ContextBuild] = {}
        self._plans: dict[int, Any] = {}  # where the cluster has those of the open contexts
        # Each is made once, because Ray keeps what it knows of every one it is given. Retries are counted here and not
        # by Ray, which begins a task that needs too much memory again without end.
        self._build_task, self._upload_task = (
            ray.remote(num_cpus=num_cpus, max_retries=0)(run_piece) for num_cpus in (needs.num_threads, 0)
        )
        self._running: dict[Any, tuple[int, Piece]] = {}
        self._builders = _Builders(ray)
        self._had_room = time.monotonic()

    def run(self) -> None:
        try:
            while self._waiting or self._open:
                self._submit()
                self._close_those_that_ended()
                for ref in self._wait():
                    self._settle(ref)
                self._close_those_that_ended()
                self._pass_on_progress()
        finally:
            for ref in self._running:
                self._cancel(ref)
            self._builders.end()
            for build in self._open.values():
                build.abandon()
            with suppress(Exception):
                self._ray.kill(self._board)

    def _wait(self) -> list[Any]:
        """The tasks that have ended, as soon as there is one or a GPU's process is there, or after a while."""
        refs = [*self._running, *self._builders.asked]
        if not refs:
            time.sleep(_POLL_S)
            return []
        return [ref for ref in self._ray.wait(refs, timeout=_POLL_S)[0] if ref in self._running]

    def _submit(self) -> None:
        room, now = self._needs.room(_nodes(self._ray)), time.monotonic()
        self._had_room = now if room else self._had_room
        if now - self._had_room > NO_ROOM_S:
            self._give_up(f"the cluster had no node for it for {NO_ROOM_S:.0f} s")
        num_open = sum(not build.is_waiting for build in self._open.values())
        for job_idx in list(self._waiting)[: max(0, room + 2 - num_open)]:
            self._open[job_idx] = self._waiting.pop(job_idx)
        if self._needs.device == "cuda":
            num_builds = sum(build.needs_model for build in (*self._open.values(), *self._waiting.values()))
            self._builders.look(min(room, num_builds))
            if self._builders.why_lost:
                self._give_up(f"processes on GPUs die as they start, last of {self._builders.why_lost}")
        for job_idx, build in self._open.items():
            with failing(build):
                if (piece := build.due()) is not None and (piece.kind == "upload" or self._has_room(room)):
                    self._start(job_idx, build, piece)

    def _has_room(self, room: int) -> bool:
        """On CPUs one task more waits on the cluster, lest a node wait for us."""
        if self._needs.device == "cuda":
            return self._builders.has_idle
        return sum(piece.kind != "upload" for _, piece in self._running.values()) <= room

    def _start(self, job_idx: int, build: ContextBuild, piece: Piece) -> None:
        build.start(piece)
        if build.plan is not None and job_idx not in self._plans:
            self._plans[job_idx] = self._ray.put(build.plan)
        needs = self._needs
        more = (self._plans.get(job_idx), build.store, needs.device, needs.num_threads, job_idx, self._board)
        run = self._build_task.remote if needs.device == "cpu" else self._builders.run_piece
        if piece.kind == "upload":
            run = self._upload_task.remote
        self._running[run(piece, self._jobs[job_idx], *more)] = job_idx, piece

    def _cancel(self, ref: Any) -> None:
        with suppress(Exception):  # it may have ended, or been cancelled before
            if not self._builders.drop(ref):
                self._ray.cancel(ref, force=True)

    def _give_up(self, reason: str) -> None:
        """Fail what is left."""
        for ref in self._running:
            self._cancel(ref)
        self._running.clear()
        self._open |= self._waiting
        for build in self._open.values():
            build.fail(reason)
        self._waiting.clear()

    def _settle(self, ref: Any) -> None:
        """Take a task's result, or have its piece done again when its worker died."""
        job_idx, piece = self._running.pop(ref)
        value, died = self._outcome_of(ref)
        self._builders.settle(ref, value, died)
        build = self._open.get(job_idx)
        if build is None or build.outcome is not None:
            return
        with failing(build):
            if died:
                build.lose(piece, sentence(value))
            elif isinstance(value, Exception):
                build.fail(sentence(value))
            else:
                build.settle(piece, value)

    def _outcome_of(self, ref: Any) -> tuple[Any, bool]:
        """What a task returned or what it ran into, and whether that was its worker's end."""
        try:
            return self._ray.get(ref), False
        except self._ray.exceptions.RayTaskError as error:
            return error.cause, False
        except self._ray.exceptions.RayError as error:
            return error, True

    def _close_those_that_ended(self) -> None:
        for job_idx, build in list(self._open.items()):
            if build.outcome is None:
                continue
            del self._open[job_idx]
            self._plans.pop(job_idx, None)
            for ref, (other_idx, _) in self._running.items():
                if other_idx == job_idx:
                    self._cancel(ref)
            self._on_result(job_idx, result_of(self._jobs[job_idx], build))

    def _pass_on_progress(self) -> None:
        """Show how far each open context is, of which the board knows; it may be on a node that dies."""
        if self._news is None:
            self._news = self._board.take.remote()
        if self._ray.wait([self._news], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                for job_idx, progress in self._ray.get(self._news).items():
                    if job_idx in self._open:
                        self._open[job_idx].show(progress)
            self._news = None
        for job_idx, build in self._open.items():
            if (state := build.progress) is not None:
                self._on_progress(job_idx, state)


class _Builders:
    """Actors that have a GPU each. Only those that have said that they are there get something to do."""

    def __init__(self, ray: Any):
        self._ray = ray
        self._make = ray.remote(num_gpus=1, num_cpus=0)(GpuBuilder).remote
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

    def run_piece(self, *arguments: Any) -> Any:
        builder = self._idle.pop()
        ref = builder.run_piece.remote(*arguments)
        self._busy[ref] = builder
        return ref

    def settle(self, ref: Any, value: Any, died: bool) -> None:
        """Keep an actor that did what it should; what else it ran into may have broken its GPU's context for good."""
        builder = self._busy.pop(ref, None)
        if builder is None:
            return
        if died:  # and others with it, if it was a node: they would each cost a piece an attempt
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
