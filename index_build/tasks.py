"""What Ray's workers run: a piece of a build each. Thin: the work is in `pieces.py`."""

import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from csattn.build_options import BuildOptions
from csattn.models import LoadedModel, load_model
from index_build.batch import plan_job
from index_build.job_list import Job
from index_build.pieces import BuildProgress, Piece, perform
from index_build.plan import Plan

_SHOW_EVERY_S = 0.5


def run_piece(
    piece: Piece, job: Job, plan: Plan | None, store: Path, device: str, num_threads: int, job_idx: int, board: Any
) -> Plan | int:
    """Do a piece of a job. device: the prefill's; all else needs no GPU."""
    torch.set_num_threads(num_threads)
    if plan is None:  # the index is made on CPUs
        plan = plan_job(job, _model(job.options, "cpu"), "cpu")
        return replace(plan, versions={**plan.versions, "device": device})
    shown_s = time.monotonic()

    def show(progress: BuildProgress) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _SHOW_EVERY_S:
            shown_s = time.monotonic()
            board.put.remote(job_idx, progress.layer_idx, progress.done)

    loaded = _model(job.options, device) if piece.kind == "prefill" else None
    return perform(piece, plan, store, loaded, num_threads, show)


@lru_cache(maxsize=1)
def _load(name: str | None, dtype: str, device: str, weights: str | None) -> LoadedModel:
    """The model that this process loaded last: tasks of one model follow each other."""
    return load_model(name, dtype, device, weights=weights, may_lend=True)


def _model(options: BuildOptions, device: str) -> LoadedModel:
    return _load(options.model, options.dtype, device, options.weights)
