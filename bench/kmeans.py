"""Compares programs that make a layer's codebooks for `lists`: FAISS on all CPUs, FAISS on a GPU, batched torch.

    python -m bench.kmeans [--device cuda] [--layers 2] [--points 131072] [--json FILE]

Queries are recorded (`python -m bench.decode record`), brought to Llama-3.1-8B's shape, and tiled with noise to
--points points. A layer has 64 problems; of each, FAISS uses 32,768 points and the batched program 131,072. Fit is the
mean over all problems of 1 - cosine from every point to its nearest centroid (less is better), compared with FAISS on
CPUs. Gate: no program fits 2 % worse than that. FAISS on a GPU is left out if it finds no GPU; it needs `faiss-gpu`
instead of `faiss-cpu`.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.decode.recording import default_path, load_recording
from bench.decode.widened import Heads, tile_rows, wide_context_queries
from bench.shapes import shape_named
from bench.timing import finish, gate, machine, options_parser
from csattn.config import ListConfig, preset
from csattn.cpus import available_cpus
from index_build.codebooks import make_codebooks
from index_build.kmeans import faiss_version, num_gpus
from index_build.kmeans_torch import SMALLEST_NORM

SHAPE = "llama-3.1-8b"
REPEATS, MOST_WORSE = 3, 0.02


def fit(queries: Tensor, codebooks: Tensor) -> float:
    """Return the mean over all problems of 1 - cosine from a point to the nearest centroid.

    queries: [num_kv_heads, num_points, head_dim]; codebooks: [num_kv_heads, num_subspaces, num_centroids, width].
    """
    losses = []
    for of_head, of_subspaces in zip(queries, codebooks, strict=True):
        for points, centroids in zip(of_head.split(codebooks.shape[3], dim=1), of_subspaces, strict=True):
            norms = points.norm(dim=1)
            cosines = (points @ centroids.T).amax(1) / norms
            losses.append(float(1 - cosines[norms > SMALLEST_NORM].double().mean()))
    return float(np.mean(losses))


def measure(queries: Tensor, config: ListConfig, threads: Executor) -> list[dict[str, Any]]:
    """Measure each program's time for a layer and its fit. queries: on the device of the prefill, as in a build."""

    def by_faiss(on_gpu: bool) -> Tensor:
        with patch("index_build.kmeans.uses_gpu", return_value=on_gpu):
            return make_codebooks(queries, replace(config, kmeans="faiss"), threads)

    programs: dict[str, Callable[[], Tensor]] = {f"FAISS, {available_cpus()} CPUs": partial(by_faiss, False)}
    if num_gpus():
        programs["FAISS, a GPU"] = partial(by_faiss, True)
    programs[f"torch, {queries.device.type}"] = partial(
        make_codebooks, queries, replace(config, kmeans="torch"), threads
    )
    cases: list[dict[str, Any]] = []
    for name, run in programs.items():
        misfit, seconds = fit(queries, run()), []
        for _ in range(REPEATS):
            started = time.perf_counter()
            run().cpu()
            seconds.append(time.perf_counter() - started)
        ratio = misfit / cases[0]["fit"] if cases else 1.0
        gate(ratio < 1 + MOST_WORSE, f"centroids of {name} fit {ratio - 1:.1%} worse than FAISS's on CPUs")
        layer_s = round(float(np.median(seconds)), 4)
        cases.append({"program": name, "layer_s": layer_s, "fit": misfit, "times_faiss": round(ratio, 4)})
    return cases


def parser() -> argparse.ArgumentParser:
    parsed = options_parser(__doc__)
    parsed.add_argument("--recording", type=Path, default=default_path())
    parsed.add_argument("--layers", type=int, default=2, help="recorded layers to use, from the first")
    parsed.add_argument("--points", type=int, default=131072, help="points of each problem")
    parsed.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the batched program"
    )
    return parsed


def main() -> None:
    arguments = parser().parse_args()
    device, config = torch.device(arguments.device), preset("lists")
    assert isinstance(config, ListConfig)
    recording, heads = load_recording(arguments.recording), Heads.of(shape_named(SHAPE))
    cases: list[dict[str, Any]] = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        for layer_idx in range(arguments.layers):
            recorded = wide_context_queries(recording, layer_idx, heads).unflatten(0, (heads.num_kv_heads, -1))
            tiled = tile_rows(recorded.flatten(1, 2)[:, :, None], arguments.points, torch.float32, layer_idx)
            for case in measure(tiled[:, :, 0].contiguous().to(device), config, threads):
                case |= {"layer": layer_idx, "problems": heads.num_kv_heads * config.num_subspaces}
                case |= {"points": arguments.points, "width": heads.head_dim // config.num_subspaces}
                print(case, flush=True)
                cases.append(case)
    header = {"bench": "kmeans", "shape": SHAPE, "machine": machine(), **faiss_version(), "faiss_gpus": num_gpus()}
    finish({**header, "num_centroids": config.num_centroids, "cases": cases}, arguments.json)


if __name__ == "__main__":
    main()
