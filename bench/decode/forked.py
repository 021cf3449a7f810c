"""Search workers over indexes that a benchmark made: forked processes, which inherit them in their memory."""

import multiprocessing
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from csattn.cpus import available_cpus
from csattn.index import ListIndex
from csattn.models.spec import ModelSpec
from csattn.sketch import SketchIndex
from workers.searchers.worker import SearchWorker, WorkerSpec, choose_cpus
from workers.searchers.worker_searcher import WorkerSearcher


class InMemoryContext:
    """The part of an artifact's interface that searchers use, over indexes in memory."""

    def __init__(self, shape: ModelSpec, layers: Sequence[ListIndex | SketchIndex]) -> None:
        self.path, self._layers = Path("made"), layers
        model = SimpleNamespace(num_layers=len(layers), num_q_heads=shape.num_q_heads, head_dim=shape.head_dim)
        self.spec = SimpleNamespace(context_len=layers[0].context_len, num_index_heads=layers[0].num_heads, model=model)

    def indexes(self) -> list[ListIndex | SketchIndex]:
        return list(self._layers)

    def layer_index(self, layer_idx: int) -> ListIndex | SketchIndex:
        return self._layers[layer_idx]

    def close(self) -> None:
        """Do nothing: the benchmark owns the memory."""


class ForkedWorkers:
    """Launches search workers, one at a time. Each loads the context given here, whatever it is asked for."""

    def __init__(self, context: Any) -> None:
        self._context, self._one_at_a_time = context, threading.Lock()

    def __call__(self, spec: WorkerSpec) -> "ForkedWorker":
        with self._one_at_a_time:
            return ForkedWorker(SearchWorker(spec, lambda path: self._context))


class ForkedWorker:
    def __init__(self, worker: SearchWorker) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=worker.serve, daemon=True)
        self._process.start()

    def fault(self) -> str | None:
        return None if self._process.is_alive() else "it has ended"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def forked_searcher(context: Any, num_workers: int, num_contexts: int) -> WorkerSearcher:
    """Return a searcher whose workers share all CPUs. The context is loaded under every id below `num_contexts`."""
    threads_each = max(1, available_cpus() // num_workers)
    cpus = choose_cpus(num_workers * threads_each)
    searcher = WorkerSearcher(num_workers, threads_per_worker=threads_each, cpus=cpus, launch=ForkedWorkers(context))
    for context_id in range(num_contexts):
        searcher.load(context_id, context)
    return searcher
