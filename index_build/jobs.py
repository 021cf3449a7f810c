"""Many contexts over a Ray cluster: tasks that prefill on GPUs (or CPUs), and tasks that index on CPUs.

Context files, models and the store lie where every node sees them, under the same paths. Tasks hand over by files in
the store, and what is there is not made again: a task whose worker or node died is begun again elsewhere, a batch that
was interrupted goes on where it stopped.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from csattn.errors import ConfigError
from index_build.batch import BatchReport, JobProgress, JobResult, by_model, sentence
from index_build.context_build import ContextBuild, Piece
from index_build.job_list import Job
from index_build.needs import TaskNeeds, choose_needs
from index_build.tasks import TASKS, Board

NO_ROOM_S = 600.0  # how long a cluster may be without a node for a task
_CONNECT_S = 5.0
_POLL_S = 0.1


def run_on_ray(
    jobs: Sequence[Job],
    store: Path | str,
    address: str = "auto",
    *,
    device: str = "auto",
    num_threads: int | None = None,
    heads_per_piece: int | None = None,
    on_progress: Callable[[JobProgress], None] = lambda progress: None,
    on_result: Callable[[JobResult], None] = lambda result: None,
) -> BatchReport:
    """Build all jobs on a cluster; whatever fails is in the report.

    address: of the cluster; `auto` finds the one this process belongs to, `local` starts one on this machine for as
    long as the batch takes. Where this process is connected already, that connection is used.
    num_threads: CPUs of each task but a prefill on a GPU, which has one. [default: the smallest node's, at most 8]
    heads_per_piece: KV heads of a layer that one task indexes. [default: as many as make it worth a task]
    Raises ConfigError when there is no ray, no such cluster, or no node in it that a task fits on.
    """
    started = time.perf_counter()
    with _connected(address) as ray:
        prefill, index = choose_needs(_nodes(ray), device, num_threads)
        builds = [ContextBuild(idx, jobs[idx], store, heads_per_piece) for group in by_model(jobs) for idx in group]
        _Dispatch(ray, builds, prefill, index, on_progress, on_result).run()
    results = {build.job_idx: build.result for build in builds if build.result is not None}
    return BatchReport(tuple(results[idx] for idx in range(len(jobs))), time.perf_counter() - started)


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


class _Dispatch:
    """Keeps as many tasks in flight as the cluster has room for, and one more of a kind, until every job has a result.

    Contexts are opened in their order, and those that were opened first are finished first.
    """

    def __init__(
        self,
        ray: Any,
        builds: Sequence[ContextBuild],
        prefill: TaskNeeds,
        index: TaskNeeds,
        on_progress: Callable[[JobProgress], None],
        on_result: Callable[[JobResult], None],
    ):
        self._ray = ray
        self._prefill, self._index = prefill, index
        self._on_progress, self._on_result = on_progress, on_result
        self._board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote()
        self._news: Any = None  # what the board was asked for
        self._waiting = deque(builds)
        self._open: dict[int, ContextBuild] = {}  # by job
        self._remotes: dict[tuple[Callable[..., Any], TaskNeeds], Any] = {}
        self._running: dict[Any, tuple[Piece, TaskNeeds]] = {}
        self._had_room = time.monotonic()

    def run(self) -> None:
        try:
            while self._waiting or self._open:
                self._submit()
                self._close_those_with_a_result()
                for ref in self._wait():
                    self._settle(ref)
                self._close_those_with_a_result()
                self._pass_on_progress()
        finally:
            for ref in self._running:
                with suppress(Exception):
                    self._ray.cancel(ref, force=True)
            for build in self._open.values():
                build.abandon()
            with suppress(Exception):
                self._ray.kill(self._board)

    def _wait(self) -> list[Any]:
        """The tasks that have ended, as soon as there is one, or after a while."""
        if self._running:
            return list(self._ray.wait(list(self._running), timeout=_POLL_S)[0])
        time.sleep(_POLL_S)
        return []

    def _submit(self) -> None:
        nodes = _nodes(self._ray)
        # One task of each kind waits on the cluster, lest a node wait for us.
        room = {needs: needs.room(nodes) for needs in (self._prefill, self._index)}
        now = time.monotonic()
        self._had_room = now if all(room.values()) else self._had_room
        if now - self._had_room > NO_ROOM_S:
            self._give_up()
        num_open = sum(not build.is_waiting for build in self._open.values())
        for build in list(self._waiting)[: max(0, room[self._prefill] + 2 - num_open)]:
            self._open[build.job_idx] = self._waiting.popleft()
        for build in self._open.values():
            with _failing(build):
                for piece in build.due():
                    needs = self._prefill if piece.kind == "prefill" else self._index
                    if sum(other == needs for _, other in self._running.values()) <= room[needs]:
                        self._start(build, piece, needs)

    def _start(self, build: ContextBuild, piece: Piece, needs: TaskNeeds) -> None:
        build.start(piece)
        plan = build.plan if piece.kind == "prefill" else build.plan and build.plan.spec
        device = self._prefill.device  # a plan is made on a CPU, and names it
        more = {"prefill": [self._board], "upload": [build.url]}.get(piece.kind, [])
        more += [build.groups] if piece.kind == "join" else []
        task = self._remote(TASKS[piece.kind], needs)
        self._running[task.remote(piece, build.job, plan, build.store, device, needs.num_threads, *more)] = piece, needs

    def _remote(self, task: Callable[..., Any], needs: TaskNeeds) -> Any:
        """That function as a task; the same one each time, because Ray keeps what it knows of every one it is given."""
        if (task, needs) not in self._remotes:
            # retries are counted here and not by Ray, which begins a task that needs too much memory again without end
            options: dict[str, Any] = {"num_cpus": needs.num_threads, "max_retries": 0}
            if needs.device == "cuda":
                options |= {"num_gpus": 1, "max_calls": 1}  # a process that has met one GPU cannot be given another
            self._remotes[task, needs] = self._ray.remote(**options)(task)
        return self._remotes[task, needs]

    def _give_up(self) -> None:
        """Fail what is left."""
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        self._running.clear()
        for build in [*self._open.values(), *self._waiting]:
            self._open[build.job_idx] = build
            build.fail(f"the cluster had no node for it for {NO_ROOM_S:.0f} s")
        self._waiting.clear()

    def _settle(self, ref: Any) -> None:
        """Take a task's result, or have its piece done again when its worker died."""
        piece, _ = self._running.pop(ref)
        build = self._open.get(piece.job_idx)
        if build is None or build.result is not None:
            return
        with _failing(build):
            try:
                build.settle(piece, self._ray.get(ref))
            except self._ray.exceptions.RayTaskError as error:  # not the worker's end: what it ran into
                build.fail(sentence(error.cause))
            except self._ray.exceptions.RayError as error:
                build.lose(piece, sentence(error))

    def _close_those_with_a_result(self) -> None:
        for build in list(self._open.values()):
            if build.result is None:
                continue
            del self._open[build.job_idx]
            for ref, (piece, _) in self._running.items():
                if piece.job_idx == build.job_idx:
                    self._ray.cancel(ref, force=True)
            self._on_result(build.result)

    def _pass_on_progress(self) -> None:
        """Show how far each open context is; rows of a layer come from the board, which may be on a node that dies."""
        if self._news is None:
            self._news = self._board.take.remote()
        if self._ray.wait([self._news], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                for job_idx, (layer_idx, num_rows) in self._ray.get(self._news).items():
                    if job_idx in self._open:
                        self._open[job_idx].add_rows(layer_idx, num_rows)
            self._news = None
        for build in self._open.values():
            if (progress := build.progress) is not None:
                self._on_progress(progress)


@contextmanager
def _failing(build: ContextBuild) -> Iterator[None]:
    """One context must not end the others, whatever is wrong with it."""
    try:
        yield
    except Exception as error:
        build.fail(sentence(error))
