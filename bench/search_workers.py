"""What do search workers add to a search? `python -m bench.search_workers [--json FILE] [--quick] [--workers N ...]`.

One layer at a time, as the engine does: queries go to the workers, selections come back. A worker reports how long it
has searched; the rest of the client's wait is the overhead. Then workers are killed during searches.
Gate: they choose bit for bit what this process chooses.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import end_as_interrupted, finish, gate, options_parser
from csattn.artifact import Artifact, open_artifact
from csattn.search import LayerSearch, SearchWorkspace, TokenSelections
from tests.artifact.synthetic import build, make_spec
from workers.engine.cpu.pool_searcher import RowSearch
from workers.searchers.worker import choose_cpus
from workers.searchers.worker_searcher import WorkerSearcher

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 6, 4, 64  # two query heads for each
KEEP, SINK_LEN, WINDOW_LEN = 0.05, 4, 256
BETWEEN_US = 500.0  # the pause between two layers in `alone_with_pauses`, as for the engine's other work

Layer = Callable[[int, RowSearch], int]  # searches a layer; returns the ns of the search itself


def make_step(artifact: Artifact, num_rows: int, seed: int = 0) -> RowSearch:
    model, num_heads = artifact.spec.model, artifact.spec.num_index_heads
    q = np.random.default_rng(seed).standard_normal((num_rows, model.num_q_heads, model.head_dim), np.float32)
    top_k = round(KEEP * artifact.spec.context_len)
    out = TokenSelections(np.empty((num_rows, num_heads, top_k), np.int32), np.empty((num_rows, num_heads), np.int32))
    return RowSearch(0, q, SINK_LEN, WINDOW_LEN, 0.125, out)


def by_workers(searcher: WorkerSearcher) -> Layer:
    def search(layer_idx: int, step: RowSearch) -> int:
        searcher.start(layer_idx, [step])
        searcher.finish()
        return searcher.worked_ns

    return search


def check(search: Layer, artifact: Artifact, step: RowSearch) -> None:
    """Raise GateError unless every layer's choice is the one made in this process."""
    for layer_idx in range(NUM_LAYERS):
        search(layer_idx, step)
        want = TokenSelections(np.empty_like(step.out.kv_indices), np.empty_like(step.out.valid_len))
        index = artifact.layer_index(layer_idx)
        LayerSearch(step.q, index, None, SINK_LEN, WINDOW_LEN, step.softmax_scale, want).run(SearchWorkspace())
        same = (want.kv_indices == step.out.kv_indices).all() and (want.valid_len == step.out.valid_len).all()
        gate(bool(same), f"layer {layer_idx} was searched otherwise than in one thread")


def time_layers(search: Layer, step: RowSearch, seconds: float, between_us: float) -> dict[str, Any]:
    """Measure each layer's round trip and its overhead over the search, in µs."""
    total, added = list[float](), list[float]()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for layer_idx in range(NUM_LAYERS):
            until = time.perf_counter() + between_us * 1e-6
            while time.perf_counter() < until:
                pass
            since = time.perf_counter_ns()
            worked_ns = search(layer_idx, step)
            total.append((time.perf_counter_ns() - since) / 1e3)
            added.append(total[-1] - worked_ns / 1e3)
    return {"total_us": _spread(total), "added_us": _spread(added)}


def _spread(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "min": round(min(times), 1), "num": len(times)}


def measure_losses(searcher: WorkerSearcher, artifact: Artifact, step: RowSearch, num_kills: int) -> dict[str, Any]:
    """Measure the time of a layer during which a worker dies, and the time until the worker is back."""
    stalls_ms, back_s = [], []
    for turn in range(num_kills):
        handle: Any = searcher._supervisors[turn % len(searcher._supervisors)].handle
        os.kill(handle.pid, signal.SIGSTOP)  # so that it dies with the request unanswered
        since = time.perf_counter()
        searcher.start(turn % NUM_LAYERS, [step])
        os.kill(handle.pid, signal.SIGKILL)
        searcher.finish()
        stalls_ms.append((time.perf_counter() - since) * 1e3)
        check(by_workers(searcher), artifact, step)
        while searcher.health().num_alive < searcher.health().num_workers:
            time.sleep(0.01)
        back_s.append(time.perf_counter() - since)
    return {"kills": num_kills, "layer_ms_max": round(max(stalls_ms), 2), "back_s_max": round(max(back_s), 2)}


def measure(artifact: Artifact, num_workers: int, num_rows: int, seconds: float, num_kills: int) -> dict[str, Any]:
    step = make_step(artifact, num_rows)
    result: dict[str, Any] = {"workers": num_workers, "rows": num_rows}
    with WorkerSearcher(num_workers, cpus=choose_cpus(num_workers)) as searcher:
        searcher.load(0, artifact)
        workers = by_workers(searcher)
        check(workers, artifact, step)
        result["alone"] = time_layers(workers, step, seconds, 0.0)
        result["alone_with_pauses"] = time_layers(workers, step, seconds, BETWEEN_US)
        gate(searcher.health().num_losses == 0, "a worker was lost while it was measured")
        result["losses"] = measure_losses(searcher, artifact, step, num_kills)
    return result


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="make a short run")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    end_as_interrupted()
    seconds, num_kills = (1.0, 2) if arguments.quick else (5.0, 5)
    with tempfile.TemporaryDirectory(prefix="csattn-bench-") as store:
        sizes: Any = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        spec = make_spec(arguments.context, kv_dtype="bfloat16", **sizes)
        results = []
        with open_artifact(build(Path(store), spec)) as artifact:
            for num_workers in arguments.workers:
                for num_rows in (1, 8):
                    results.append(measure(artifact, num_workers, num_rows, seconds, num_kills))
                    print(results[-1], flush=True)
    finish({"name": "search-workers", "context_len": arguments.context, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
