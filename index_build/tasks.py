"""What Ray's workers run: a piece of a build each, by its kind. Thin: the work is in `pieces.py`."""

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from csattn.artifact import ArtifactSpec, RemoteStore
from csattn.models import LoadedModel, load_model
from index_build.context_build import Piece
from index_build.job_list import Job
from index_build.pieces import Plan, index_heads, join_layer, make_plan, prefill_layers

_TELL_EVERY_S = 0.5


class Board:
    """An actor that keeps where each job's prefill is until it is asked for."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, int]] = {}

    def tell(self, job_idx: int, layer_idx: int, num_rows: int) -> None:
        self._latest[job_idx] = (layer_idx, num_rows)

    def take(self) -> dict[int, tuple[int, int]]:
        latest, self._latest = self._latest, {}
        return latest


def plan_piece(piece: Piece, job: Job, plan: None, store: Path, device: str, num_threads: int) -> Plan:
    """What the artifact will be. device: the prefill's; reading the context needs no GPU."""
    torch.set_num_threads(num_threads)
    return make_plan(job, _model(job.options.model, job.options.dtype, "cpu"), device)


def prefill_piece(piece: Piece, job: Job, plan: Plan, store: Path, device: str, num_threads: int, board: Any) -> int:
    torch.set_num_threads(num_threads)
    told_s, current, done = time.monotonic(), -1, 0

    def tell(layer_idx: int, num_rows: int) -> None:
        nonlocal told_s, current, done
        done = num_rows + (done if layer_idx == current else 0)
        current = layer_idx
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            board.tell.remote(job_idx=piece.job_idx, layer_idx=layer_idx, num_rows=done)

    loaded = _model(job.options.model, job.options.dtype, device)
    return prefill_layers(loaded, plan, store, piece.stop_layer, tell)


def index_piece(piece: Piece, job: Job, spec: ArtifactSpec, store: Path, device: str, num_threads: int) -> bool:
    torch.set_num_threads(num_threads)
    return index_heads(spec, store, piece.layer_idx, piece.heads, num_threads)


def join_piece(
    piece: Piece, job: Job, spec: ArtifactSpec, store: Path, device: str, num_threads: int, groups: list[range]
) -> bool:
    return join_layer(spec, store, piece.layer_idx, groups)


def upload_piece(
    piece: Piece, job: Job, spec: ArtifactSpec, store: Path, device: str, num_threads: int, url: str
) -> bool:
    RemoteStore(url).upload(store / spec.artifact_id)
    return True


TASKS: dict[str, Callable[..., Any]] = {
    "plan": plan_piece,
    "prefill": prefill_piece,
    "index": index_piece,
    "join": join_piece,
    "upload": upload_piece,
}


@lru_cache(maxsize=1)
def _model(name: str | None, dtype: str, device: str) -> LoadedModel:
    """The model that this process loaded last: tasks of one model follow each other."""
    return load_model(name, dtype, device)
