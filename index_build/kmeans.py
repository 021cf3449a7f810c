"""Spherical k-means by FAISS, the definition of k-means here. No other file imports FAISS."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from csattn.cpus import available_cpus
from index_build.kmeans_torch import SMALLEST_NORM

_gpu_turn = Lock()  # threads take turns with the one pool of GPU memory
_CPUS_AS_FAST = 7  # so many CPUs in parallel are as fast as FAISS on an H100, which takes one problem at a time
_GPU_BYTES = 2**28  # for the distances of a problem


def spherical_kmeans(
    points: NDArray[np.float32],  # [num_points, subspace_dim]
    num_centroids: int,
    num_iterations: int,
    seed: int,
) -> NDArray[np.float32]:
    """Cluster the points' directions, from k-means++ seeds: unit centroids [num_centroids, subspace_dim].

    Points of norm zero have no direction and are left out. With no more points than centroids, the points themselves
    are the centroids, repeated. Deterministic for a seed. Uses one thread on the CPU: callers run problems in parallel.
    """
    norms = np.linalg.norm(points, axis=1)
    directions = points[norms > SMALLEST_NORM] / norms[norms > SMALLEST_NORM, None]
    if len(directions) <= num_centroids:
        return _repeat_to(directions, num_centroids, points.shape[1])
    on_gpu = uses_gpu()
    kmeans = faiss.Kmeans(
        points.shape[1],
        num_centroids,
        niter=num_iterations,
        spherical=True,
        seed=seed,
        init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS,
        min_points_per_centroid=1,
    )
    with _gpu_turn if on_gpu else _one_thread():
        if on_gpu:
            kmeans.index = faiss.GpuIndexFlatIP(_gpu_memory(), points.shape[1])
        try:
            kmeans.train(np.ascontiguousarray(directions, dtype=np.float32))
        finally:
            kmeans.index = None  # frees its memory while this thread holds the lock
    centroids: NDArray[np.float32] = kmeans.centroids.copy()
    degenerate = ~np.isclose(np.linalg.norm(centroids, axis=1), 1.0, atol=1e-3)  # empty, or a mean of opposite points
    centroids[degenerate] = directions[:: max(1, len(directions) // num_centroids)][: degenerate.sum()]
    return centroids


@cache
def _gpu_memory() -> Any:
    """Return FAISS's device memory, kept for the life of the process: reserving it takes longer than a k-means."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_GPU_BYTES)
    return resources


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run FAISS on one thread, then restore the setting, which torch shares on this thread if both use one OpenMP."""
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)


def faiss_version() -> dict[str, Any]:
    """Return what the manifest records of FAISS."""
    return {
        "faiss": faiss.__version__,
        "faiss_options": faiss.get_compile_options().strip(),
        "faiss_gpus": str(int(uses_gpu())),
    }


def uses_gpu() -> bool:
    """Whether k-means runs on a GPU: if FAISS finds a GPU, and fewer than _CPUS_AS_FAST CPUs are available."""
    return num_gpus() > 0 and available_cpus() < _CPUS_AS_FAST


def num_gpus() -> int:
    """Return the number of GPUs that FAISS can use; a CPU build says 0, or lacks the function."""
    return int(getattr(faiss, "get_num_gpus", lambda: 0)())


def _repeat_to(directions: NDArray[np.float32], num_centroids: int, width: int) -> NDArray[np.float32]:
    if len(directions) == 0:
        directions = np.eye(1, width, dtype=np.float32)
    return np.ascontiguousarray(np.resize(directions, (num_centroids, width)), dtype=np.float32)
