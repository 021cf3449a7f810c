"""Tasks of a batch that do not go as planned; they run in Ray's workers, which find them here by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from csattn.artifact import list_store
from csattn.models import load_model
from index_build.batch import JobProgress, JobResult, build_job
from index_build.job_list import Job
from index_build.jobs import TaskNeeds

PATIENCE_S = 60.0


def die_once_in_the_last_layer(job_idx: int, job: Job, store: Path, needs: TaskNeeds, board: Any) -> JobResult:
    """The first builder that gets there is killed with the lock in its hands."""

    def die(progress: JobProgress) -> None:
        if progress.where == "layer 3/3 index" and not (flag := store.parent / "died").exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return build_job(job_idx, job, load_model(job.options.model), store, on_progress=die)


def hang_on_the_lost_node(job_idx: int, job: Job, store: Path, needs: TaskNeeds, board: Any) -> JobResult:
    """Stands still in the last layer on the node that will go; elsewhere waits for that when half of six are done."""
    import ray

    is_lost = ray.get_runtime_context().get_node_id() == (store.parent / "lost-node").read_text()
    hangs = store.parent / "hangs"

    def hang(progress: JobProgress) -> None:
        if is_lost and progress.where == "layer 3/3 index":
            hangs.touch()
            time.sleep(PATIENCE_S)

    if not is_lost and len(list_store(store)) >= 3:
        wait_for(hangs)
    return build_job(job_idx, job, load_model(job.options.model), store, on_progress=hang)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.05)
