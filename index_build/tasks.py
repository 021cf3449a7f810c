"""The tasks of Ray's workers: the build of a context, and an upload. The work itself is in `pipeline.py`."""

import time
from math import inf
from pathlib import Path
from typing import Any

import torch

from csattn.artifact import RemoteStore
from csattn.build_options import BuildOptions
from csattn.errors import ArtifactError
from csattn.models import LoadedModel
from index_build.batch import JobResult, build_job, model_for_builds, plan_job
from index_build.board import BuildState
from index_build.job_list import Job

_SHOW_EVERY_S = 0.5


def upload(url: str, artifact: Path) -> None:
    """Upload a finished artifact to a store behind a URL."""
    RemoteStore(url).upload(artifact)


class Builder:
    """An actor that keeps a GPU or CPUs, and the model that it used last, for the duration of the batch."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str | None, str, str, str | None], LoadedModel] = {}

    def ready(self) -> None:
        """Return once the actor has been placed and started."""

    def run_job(
        self,
        job: Job,
        store: Path | str,
        marker: Path,  # a file that the process that runs the batch keeps in the directory where artifacts are built
        device: str,  # the model's
        num_threads: int,
        job_idx: int,
        may_wait: bool,  # for another process that builds the same artifact
        board: Any,
    ) -> JobResult:
        """Build a job's context, without the upload to a store behind a URL.

        Raises ArtifactError if this node does not see the marker.
        """
        if not marker.exists():
            raise ArtifactError(
                f"{marker.parent} is not there on this node; give a store that every node sees under the same path"
            )
        torch.set_num_threads(num_threads)
        loaded, shown_s = self._model(job.options, device), -inf

        def show(state: BuildState) -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s >= _SHOW_EVERY_S:
                shown_s = time.monotonic()
                board.put.remote(job_idx, state)

        plan, where = plan_job(job, loaded), {"here": marker.parent, "uploads": False}
        return build_job(job, loaded, plan, store, num_threads, show, may_wait, **where)

    def _model(self, options: BuildOptions, device: str) -> LoadedModel:
        """Return the model, which this process keeps until it needs another: jobs of one model follow each other."""
        key = options.model, options.dtype, device, options.weights
        if key not in self._loaded:
            self._loaded.clear()  # before loading: memory may have room for only one model
            self._loaded[key] = model_for_builds(options, device)
        return self._loaded[key]
