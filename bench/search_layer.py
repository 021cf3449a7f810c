"""How long does one layer's search take on all cores? `python -m bench.search --layer [--threads 1 16] [--json FILE]`.

The shape of an 8B model: 32 query heads, 8 KV heads, a sketch of 131 072 keys of 128 dimensions, of which 2 % are
chosen. Layers whose sketches together exceed the last-level cache are searched in turn.
"""

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.random_sketch import random_sketch
from bench.timing import finish, gate, measure, read_bandwidth_gbps
from csattn.cpu.addresses import call_stage
from csattn.cpu.jit import exact_kernel
from csattn.cpu.waiting import now_ns
from csattn.search import LayerSearch, SearchPool, SearchWorkspace, reference
from csattn.search.plan import search_at
from csattn.search.work import FIRST_STAGE, MATCH, SCORE, SEARCH_RECORD
from csattn.search.workspace import empty_token_selections
from csattn.sketch import SketchIndex

NUM_HEADS, GROUP_SIZE, HEAD_DIM = 8, 4, 128
SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE, KEEP = 4, 256, HEAD_DIM**-0.5, 0.02
NUM_LAYERS = 16
STAGES = ("project", "weigh", "score", "guess", "copy", "choose", "attend", "join")


def make_searches(indexes: list[SketchIndex]) -> list[LayerSearch]:
    """Make a search for each layer, of one token."""
    rng = np.random.default_rng(1)
    searches = []
    for index in indexes:
        q = 2 * rng.standard_normal((1, NUM_HEADS * GROUP_SIZE, HEAD_DIM), dtype=np.float32)
        top_k = round(KEEP * index.context_len)
        rest = np.empty((1, NUM_HEADS * GROUP_SIZE, HEAD_DIM + 2), np.float32)
        out = replace(empty_token_selections(1, NUM_HEADS, top_k), rest=rest)
        searches.append(LayerSearch(q, index, None, SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE, out))
    return searches


def check(search: LayerSearch) -> None:
    """Raise GateError unless the first head's choice is the definition's."""
    assert isinstance(search.index, SketchIndex)
    got = search.out.kv_indices[0, 0]
    group_scores = reference.sketch_group_scores(search.q[0, :GROUP_SIZE], search.index, 0, len(got), SOFTMAX_SCALE)
    eligible = np.arange(SINK_LEN, search.index.context_len - WINDOW_LEN)
    best = eligible[reference.top_k_of(group_scores[eligible], len(got))]
    gate(bool((got == best).all()), "the kernel chose other rows")


def measure_threads(searches: list[LayerSearch], num_threads: int, seconds: float) -> dict[str, Any]:
    """Measure the time per layer, and of handing a search over to the threads (`start_us`)."""
    with SearchPool(num_threads) as pool:
        turn = itertools.cycle(searches)

        def one_layer() -> None:
            search = next(turn)
            pool.start(search)
            pool.finish()

        timed = measure(one_layer, seconds)
        handing_us = []
        for search in itertools.islice(turn, 50):
            started = time.perf_counter()
            pool.start(search)
            handing_us.append((time.perf_counter() - started) * 1e6)
            pool.finish()
    return {
        "us": round(timed["p50_ms"] * 1e3, 1),
        "p99_us": round(timed["p99_ms"] * 1e3, 1),
        "min_us": round(timed["min_ms"] * 1e3, 1),
        "start_us": round(float(np.median(handing_us)), 1),
    }


def measure_stages(searches: list[LayerSearch], num_threads: int) -> dict[str, float]:
    """Return the CPU time of each stage of one layer in µs, while num_threads threads work, each on other layers."""
    spent = np.zeros((num_threads, len(STAGES)), np.int64)
    rounds = 4
    ready = threading.Barrier(num_threads)

    def run(thread: int) -> None:
        workspace = SearchWorkspace()
        ready.wait()
        for i in range(rounds + 1):
            if i == 1:
                spent[thread] = 0  # the first round only warms up pages and caches
            search = searches[(thread + i) % len(searches)]
            num_jobs = search.begin_in(workspace, 0)
            _time_stages(workspace.calls, num_jobs, spent[thread])

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    means = spent.mean(axis=0) / rounds / 1e3
    return {stage: round(float(us), 1) for stage, us in zip(STAGES, means, strict=True)}


@exact_kernel
def _time_stages(calls: NDArray[np.int64], num_jobs: int, spent_ns: NDArray[np.int64]) -> None:
    search_address, scratch_address = calls[SEARCH_RECORD], calls[SEARCH_RECORD + 1]
    search = search_at(search_address)
    for job in range(num_jobs):
        for function in range(2 * search.num_stages):
            pieces = 1
            if function == 2 * MATCH:
                pieces = search.match_pieces
            elif function == 2 * SCORE:
                pieces = search.score_pieces
            elif function % 2 == 0:
                pieces = search.num_ranges
            since = now_ns()
            for piece in range(pieces):
                call_stage(calls[FIRST_STAGE + function], search_address, scratch_address, job, piece)
            spent_ns[function] += now_ns() - since


def main(json_path: Path | None, context_len: int, thread_counts: list[int], seconds: float) -> None:
    peaks = {n: read_bandwidth_gbps(n) for n in thread_counts}
    print("read bandwidth:", ", ".join(f"{n} threads {gbps:.1f} GB/s" for n, gbps in peaks.items()), flush=True)
    indexes = [random_sketch(context_len, NUM_HEADS, HEAD_DIM, seed) for seed in range(NUM_LAYERS)]
    searches, workspace, wanted = make_searches(indexes), SearchWorkspace(), []
    for search in searches[:2]:
        search.run(workspace)
        check(search)
        wanted.append(search.out.kv_indices.copy())
    read_mbytes = indexes[0].codes.nbytes / 1e6
    results = []
    for num_threads, peak_gbps in peaks.items():
        for search in searches:
            search.out.kv_indices.fill(-1)  # else what one thread chose would pass as theirs
        timed = measure_threads(searches, num_threads, seconds)
        for search, want in zip(searches, wanted, strict=False):
            gate(bool((search.out.kv_indices == want).all()), f"{num_threads} threads choose otherwise than one")
        gbps = read_mbytes / timed["us"] * 1e3
        read = {"read_mbytes": round(read_mbytes, 1), "gbps": round(gbps, 1), "of_peak": round(gbps / peak_gbps, 3)}
        inside = {"stages_cpu_us": measure_stages(searches, num_threads)}
        results.append({"threads": num_threads} | timed | read | inside)
        print(results[-1], flush=True)
    result = {"name": "search-layer", "context_len": context_len, "results": results}
    finish(result | {"read_gbps": {n: round(gbps, 1) for n, gbps in peaks.items()}}, json_path)
