"""Tasks of a batch that do not go as planned; they run in Ray's workers, which find them here by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from csattn.artifact import ArtifactSpec, list_store
from index_build.context_build import Piece
from index_build.job_list import Job
from index_build.tasks import index_piece

PATIENCE_S = 60.0


def die_once_in_the_last_layer(piece: Piece, job: Job, spec: ArtifactSpec, store: Path, *more: Any) -> bool:
    """The first worker that is given heads of the last layer is killed."""
    if piece.layer_idx == spec.model.num_layers - 1 and not (flag := store.parent / "died").exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return index_piece(piece, job, spec, store, *more)


def hang_on_the_lost_node(piece: Piece, job: Job, spec: ArtifactSpec, store: Path, *more: Any) -> bool:
    """Stands still on the node that will go as soon as an artifact has been built; elsewhere, half of six later, waits
    for that."""
    import ray

    hangs, num_built = store.parent / "hangs", len(list_store(store)) - 1
    if ray.get_runtime_context().get_node_id() == (store.parent / "lost-node").read_text():
        if num_built >= 1:
            hangs.touch()
            time.sleep(PATIENCE_S)
    elif num_built >= 2:
        wait_for(hangs)
    return index_piece(piece, job, spec, store, *more)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.05)
