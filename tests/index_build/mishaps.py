"""Builders that fail in planned ways. They run in Ray's workers, which import them from here by name."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import index_build.tasks
from csattn.artifact import scan_store
from index_build.batch import JobResult, build_job
from index_build.board import BuildState
from index_build.job_list import Job
from index_build.tasks import Builder

PATIENCE_S = 60.0


def _run_reporting_to(report: Callable[[BuildState], None], builder: Builder, *arguments: Any) -> JobResult:
    """Run a job that reports each state to `report`, instead of some of them to the board."""

    def reporting(
        job: Job, loaded: Any, plan: Any, store: Path, num_threads: int, show: Any, *more: Any, **options: Any
    ):
        return build_job(job, loaded, plan, store, num_threads, report, *more, **options)

    with patch.object(index_build.tasks, "build_job", reporting):
        return Builder.run_job(builder, *arguments)


class DiesOnce(Builder):
    """The first builder that indexes the last layer is killed."""

    def run_job(self, job: Job, store: Path, *more: Any) -> JobResult:
        def die(state: BuildState) -> None:
            if state.where == "layer 3/3 index" and not (flag := store.parent / "died").exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return _run_reporting_to(die, self, job, store, *more)


class HangsOnTheLostNode(Builder):
    """The node that will be lost hangs in the last layer after this batch has built an artifact. The other node waits
    for this after two artifacts of the batch: three of the six are finished then."""

    def run_job(self, job: Job, store: Path, *more: Any) -> JobResult:
        import ray

        hangs, num_built = store.parent / "hangs", len(scan_store(store)[0]) - 1
        is_lost = ray.get_runtime_context().get_node_id() == (store.parent / "lost-node").read_text()

        def hang(state: BuildState) -> None:
            if is_lost and num_built >= 1 and state.where == "layer 3/3 index":
                hangs.touch()
                time.sleep(PATIENCE_S)

        if not is_lost and num_built >= 2:
            wait_for(hangs)
        return _run_reporting_to(hang, self, job, store, *more)


class BuilderOnCpu(Builder):
    """Logs its process and jobs. The first builder that has finished two builds is killed at its third."""

    def __init__(self) -> None:
        super().__init__()
        self._num_done = 0

    def run_job(self, job: Job, store: Path, marker: Path, device: str, *more: Any) -> JobResult:
        assert device == "cuda"
        if self._num_done == 2 and not (flag := store.parent / "died").exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (store.parent / "did").open("a") as file:
            file.write(f"{os.getpid()} {job.context.stem}\n")
        if job.context.stem == "breaks":
            raise RuntimeError("CUDA error")
        self._num_done += 1
        return super().run_job(job, store, marker, "cpu", *more)


class DiesOverEach(Builder):
    def run_job(self, *arguments: Any) -> JobResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class BuilderThatDies(Builder):
    def ready(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.05)
