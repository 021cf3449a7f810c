"""Tasks of a batch that do not go as planned; they run in Ray's workers, which find them here by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from csattn.artifact import list_store
from index_build.board import BuildProgress
from index_build.job_list import Job
from index_build.pieces import OnProgress, Piece, perform
from index_build.plan import Plan
from index_build.tasks import GpuBuilder, run_piece

PATIENCE_S = 60.0


def die_once_in_the_last_layer(piece: Piece, job: Job, plan: Plan | None, store: Path, *more: Any) -> Plan | None:
    """The first worker that has come to the last layer is killed."""

    def die(progress: BuildProgress) -> None:
        is_last = progress.layer_idx == progress.num_layers - 1
        if is_last and progress.phase == "index" and not (flag := store.parent / "died").exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return _run_telling(die, piece, job, plan, store, *more)


def hang_on_the_lost_node(piece: Piece, job: Job, plan: Plan | None, store: Path, *more: Any) -> Plan | None:
    """Stands still in the last layer on the node that will go as soon as an artifact has been built; elsewhere, half of
    six later, waits for that."""
    import ray

    if piece.kind != "layers":
        return run_piece(piece, job, plan, store, *more)
    hangs, num_built = store.parent / "hangs", len(list_store(store)) - 1
    is_lost = ray.get_runtime_context().get_node_id() == (store.parent / "lost-node").read_text()

    def hang(progress: BuildProgress) -> None:
        if is_lost and num_built >= 1 and progress.layer_idx == progress.num_layers - 1:
            hangs.touch()
            time.sleep(PATIENCE_S)

    if not is_lost and num_built >= 2:
        wait_for(hangs)
    return _run_telling(hang, piece, job, plan, store, *more)


def _run_telling(tell: OnProgress, *arguments: Any) -> Plan | None:
    with patch("index_build.tasks.perform", lambda *to_do: perform(*to_do[:-1], tell)):
        return run_piece(*arguments)


class BuilderOnCpu(GpuBuilder):
    """Writes down what it does; the first that has done three pieces is killed over the fourth."""

    def __init__(self) -> None:
        self._num_done = 0

    def run_piece(self, piece: Piece, job: Job, plan: Plan | None, store: Path, device: str, *more: Any) -> Plan | None:
        assert device == "cuda"
        if self._num_done == 3 and not (flag := store.parent / "died").exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        breaks = piece.kind == "layers" and job.context.stem == "breaks"
        with (store.parent / "did").open("a") as file:
            file.write(f"{os.getpid()} {'breaks' if breaks else piece.kind}\n")
        if breaks:
            raise RuntimeError("CUDA error")
        self._num_done += 1
        return super().run_piece(piece, job, plan, store, "cpu", *more)


class BuilderThatDies(GpuBuilder):
    def ready(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.05)
