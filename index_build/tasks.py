"""What Ray's workers run: a piece of a build each. Thin: the work is in `pieces.py`."""

import time
from pathlib import Path
from typing import Any

import torch

from csattn.build_options import BuildOptions
from csattn.models import LoadedModel, load_model
from index_build.batch import plan_job
from index_build.board import BuildProgress
from index_build.job_list import Job
from index_build.pieces import Piece, perform
from index_build.plan import Plan

_SHOW_EVERY_S = 0.5
_loaded: dict[tuple[str | None, str, str, str | None], LoadedModel] = {}


def run_piece(
    piece: Piece, job: Job, plan: Plan | None, store: Path, device: str, num_threads: int, job_idx: int, board: Any
) -> Plan | None:
    """Do a piece of a job; a plan's gives the plan. device: the model's."""
    torch.set_num_threads(num_threads)
    loaded = _model(job.options, device) if piece.kind != "upload" else None
    if plan is None:
        assert loaded is not None
        return plan_job(job, loaded)
    shown_s = time.monotonic()

    def show(progress: BuildProgress) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _SHOW_EVERY_S:
            shown_s = time.monotonic()
            board.put.remote(job_idx, progress)

    perform(piece, plan, store, loaded, num_threads, show)
    return None


class GpuBuilder:
    """An actor that has a GPU, and the model that it built with last, for as long as the batch takes."""

    def ready(self) -> None:
        """Answers when there is a GPU for it, and it is there."""

    def run_piece(self, *arguments: Any) -> Plan | None:
        return run_piece(*arguments)


def _model(options: BuildOptions, device: str) -> LoadedModel:
    """The model that this process loaded last: tasks of one model follow each other."""
    key = options.model, options.dtype, device, options.weights
    if key not in _loaded:
        _loaded.clear()  # first: there is room for one
        _loaded[key] = load_model(*key[:3], weights=options.weights, may_lend=True)
    return _loaded[key]
