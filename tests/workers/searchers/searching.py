"""Helpers that make searches, run searchers, and compare the result with the choice of one thread."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from csattn.artifact import Artifact, open_artifact
from csattn.search import LayerSearch, SearchPool, TokenSelections
from tests.artifact.synthetic import build, make_spec
from workers.engine.cpu.pool_searcher import RowSearch
from workers.searchers.worker import SearchWorker, WorkerSpec
from workers.searchers.worker_searcher import WorkerSearcher

POISON = -777
WAIT_S = 120  # longer than a process takes to start on a busy machine


def make_artifact(store: Path, context_len: int = 300, layout: str = "sketch", **options) -> Artifact:
    spec = make_spec(context_len, layout=layout, **({"num_layers": 3, "num_kv_heads": 3, "head_dim": 16} | options))
    return open_artifact(build(store, spec))


def make_step(
    artifact: Artifact,
    num_rows: int,
    top_k: int,
    seed: int = 0,
    context_id: int = 0,
    sink_len: int = 4,
    window_len: int = 32,
    wants_rest: bool = False,
) -> RowSearch:
    rng = np.random.default_rng(seed)
    model, num_heads = artifact.spec.model, artifact.spec.num_index_heads
    q = rng.standard_normal((num_rows, model.num_q_heads, model.head_dim), np.float32)
    out = TokenSelections(
        np.full((num_rows, num_heads, top_k), POISON, np.int32), np.full((num_rows, num_heads), POISON, np.int32)
    )
    if wants_rest:
        sizes = num_rows, model.num_q_heads, model.head_dim + 2
        out = replace(out, rest=np.full(sizes, POISON, np.float32))
    return RowSearch(context_id, q, sink_len, window_len, 0.25, out)


def assert_chosen_as_in_process(searches: Sequence[RowSearch], artifacts: dict[int, Artifact], layer_idx: int) -> None:
    """Assert that the results are bitwise those of a pool in this process."""
    with SearchPool(1) as pool:
        for search in searches:
            index = artifacts[search.context_id].layer_index(layer_idx)
            got = search.out
            arrays = got.kv_indices, got.valid_len, got.rest
            want = TokenSelections(*(None if array is None else np.full_like(array, POISON - 1) for array in arrays))
            pool.search_layers(
                [LayerSearch(search.q, index, None, search.sink_len, search.window_len, search.softmax_scale, want)]
            )
            np.testing.assert_array_equal(got.kv_indices, want.kv_indices)
            np.testing.assert_array_equal(got.valid_len, want.valid_len)
            np.testing.assert_array_equal(got.rest, want.rest)


def search_layer(
    searcher: WorkerSearcher, searches: Sequence[RowSearch], artifacts: dict[int, Artifact], layer_idx: int
) -> None:
    searcher.start(layer_idx, searches)
    searcher.finish()
    assert_chosen_as_in_process(searches, artifacts, layer_idx)


@dataclass
class ThreadWorker:
    """A worker in a thread of this process, as an actor hosts one."""

    worker: SearchWorker
    thread: threading.Thread

    def fault(self) -> str | None:
        return None

    def kill(self) -> None:
        if (connection := self.worker._connection) is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join(WAIT_S)


class Threads:
    """Launches workers as threads and keeps them."""

    def __init__(self) -> None:
        self.started: list[ThreadWorker] = []

    def __call__(self, spec: WorkerSpec) -> ThreadWorker:
        worker = SearchWorker(spec)
        thread = threading.Thread(target=worker.serve, daemon=True)
        thread.start()
        self.started.append(ThreadWorker(worker, thread))
        return self.started[-1]


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
