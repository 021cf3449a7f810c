"""The codebooks of a layer of `lists`: by FAISS on all CPUs, by FAISS on a GPU, by the batched program of torch.

    python -m bench.kmeans [--device cuda] [--layers 2] [--points 131072] [--json FILE]

Queries are recorded (`python -m bench.decode record`), brought to Llama-3.1-8B's shape, and tiled with noise to as many
points: 64 problems a layer, of which FAISS takes 32,768 points each and the batched program 131,072. Fit is the mean of
1 - cosine from every point to its nearest centroid, over all problems, beside FAISS's on CPUs: the less, the better.
Gate: no program fits 2 % worse than that. FAISS's on a GPU is left out where it finds none; `faiss-gpu` in the place of
`faiss-cpu` brings it.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.recording import default_path, load_recording
from bench.decode.widened import Heads, tile_rows, wide_context_queries
from bench.shapes import shape_named
from bench.timing import finish, gate, machine
from csattn.config import ListConfig, preset
from csattn.cpus import available_cpus
from index_build.kmeans import kmeans_version, num_gpus, spherical_kmeans
from index_build.kmeans_torch import SMALLEST_NORM, sample_points, spherical_kmeans_batch

SHAPE = "llama-3.1-8b"
REPEATS, MOST_WORSE = 3, 0.02
Codebooks = NDArray[np.float32]  # [num_problems, num_centroids, subspace_dim]


def problems(queries: Tensor, config: ListConfig) -> NDArray[np.float32]:
    """What is clustered, [num_kv_heads * num_subspaces, num_points, subspace_dim].

    queries: [num_kv_heads, num_points, head_dim].
    """
    parts = queries.float().unflatten(2, (config.num_subspaces, -1)).transpose(1, 2).flatten(0, 1)
    return np.ascontiguousarray(parts.cpu().numpy())


def by_faiss(points: NDArray[np.float32], config: ListConfig, on_gpu: bool) -> Codebooks:
    """Problems side by side, a thread each; a GPU takes one after the other."""
    with ThreadPoolExecutor(available_cpus()) as threads:
        cluster = partial(_cluster, config=config, on_gpu=on_gpu)
        return np.stack(list(threads.map(cluster, points)))


def _cluster(points: NDArray[np.float32], config: ListConfig, on_gpu: bool) -> NDArray[np.float32]:
    return spherical_kmeans(points, config.num_centroids, config.num_iterations, config.seed, on_gpu)


def by_torch(points: NDArray[np.float32], config: ListConfig, device: torch.device) -> Codebooks:
    """With the points' way there and the centroids' way back, as FAISS's has them."""
    sample = sample_points(points.shape[1], config.num_centroids, config.seed)
    sampled = torch.from_numpy(points)[:, sample].to(device)
    return spherical_kmeans_batch(sampled, config.num_centroids, config.num_iterations, config.seed).cpu().numpy()


def fit(points: NDArray[np.float32], centroids: Codebooks, device: torch.device) -> float:
    """The mean over all problems of 1 - cosine to the nearest centroid."""
    losses = []
    for of_problem, codebook in zip(points, centroids, strict=True):
        rows = torch.from_numpy(of_problem).to(device)
        norms = rows.norm(dim=1)
        cosines = (rows @ torch.from_numpy(codebook).to(device).T).amax(1) / norms
        losses.append(float(1 - cosines[norms > SMALLEST_NORM].double().mean()))
    return float(np.mean(losses))


def measure(points: NDArray[np.float32], config: ListConfig, device: torch.device) -> list[dict[str, Any]]:
    """Each program's time for a layer and its fit."""
    programs: dict[str, Callable[[], Codebooks]] = {
        f"FAISS, {available_cpus()} CPUs": partial(by_faiss, points, config, False)
    }
    if num_gpus():
        programs["FAISS, a GPU"] = partial(by_faiss, points, config, True)
    programs[f"torch, {device.type}"] = partial(by_torch, points, config, device)
    cases: list[dict[str, Any]] = []
    for name, run in programs.items():
        centroids, seconds = run(), []
        for _ in range(REPEATS):
            started = time.perf_counter()
            centroids = run()
            seconds.append(time.perf_counter() - started)
        lost = fit(points, centroids, device)
        beside = lost / cases[0]["fit"] if cases else 1.0
        gate(beside < 1 + MOST_WORSE, f"centroids of {name} fit {beside - 1:.1%} worse than FAISS's on CPUs")
        cases.append(
            {
                "program": name,
                "layer_s": round(float(np.median(seconds)), 4),
                "fit": lost,
                "times_faiss": round(beside, 4),
            }
        )
    return cases


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--recording", type=Path, default=default_path())
    parsed.add_argument("--layers", type=int, default=2, help="recorded ones, from the first")
    parsed.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the batched program"
    )
    parsed.add_argument("--json", type=Path)
    return parsed


def main() -> None:
    arguments = parser().parse_args()
    device, config = torch.device(arguments.device), preset("lists")
    assert isinstance(config, ListConfig)
    recording, heads = load_recording(arguments.recording), Heads.of(shape_named(SHAPE))
    cases: list[dict[str, Any]] = []
    for layer_idx in range(arguments.layers):
        queries = wide_context_queries(recording, layer_idx, heads).unflatten(0, (heads.num_kv_heads, -1)).flatten(1, 2)
        points = problems(tile_rows(queries[:, :, None], arguments.points, torch.float32, layer_idx)[:, :, 0], config)
        for case in measure(points, config, device):
            case |= {"layer": layer_idx, "problems": len(points), "points": points.shape[1], "width": points.shape[2]}
            print(case, flush=True)
            cases.append(case)
    header = {"bench": "kmeans", "shape": SHAPE, "machine": machine(), **kmeans_version()}
    if device.type == "cuda":
        header["gpu"] = torch.cuda.get_device_name(device)
    finish({**header, "num_centroids": config.num_centroids, "cases": cases}, arguments.json)


if __name__ == "__main__":
    main()
