"""The centroids of every head and subspace, by FAISS or by the batched k-means in torch."""

from concurrent.futures import Executor
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import KMEANS_ON_CPU, IndexConfig, ListConfig
from csattn.errors import ConfigError
from index_build.kmeans_torch import sample_points, spherical_kmeans_batch


def kmeans_version(config: IndexConfig) -> dict[str, Any]:
    """Return what the manifest records of the k-means library. Raises ConfigError if it is not installed."""
    if not isinstance(config, ListConfig) or config.kmeans == "torch":
        return {}
    if KMEANS_ON_CPU == "torch":
        raise ConfigError(
            "k-means by FAISS is not available on macOS, where its OpenMP and torch's crash together; use --kmeans "
            "torch"
        )
    if find_spec("faiss") is None:
        raise ConfigError(
            "k-means by FAISS needs faiss, which is not installed; install faiss-cpu, or use --kmeans torch"
        )
    from index_build.kmeans import faiss_version  # only here, so that builds without FAISS do not load its OpenMP

    return faiss_version()


def make_codebooks(
    queries: Tensor,  # [num_index_heads, num_queries, head_dim]
    config: ListConfig,
    threads: Executor,  # runs FAISS on the subspaces side by side
) -> Tensor:
    """Cluster the queries' parts by subspace.

    Returns unit centroids [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32.
    """
    num_heads, num_queries, head_dim = queries.shape
    shape = (num_heads, config.num_subspaces, config.num_centroids, head_dim // config.num_subspaces)
    if config.kmeans == "torch":
        sample = sample_points(num_queries, config.num_centroids, config.seed).to(queries.device)
        points = queries[:, sample].float()
        points = points.view(num_heads, len(sample), *shape[1::2]).transpose(1, 2).flatten(0, 1)
        return spherical_kmeans_batch(points, config.num_centroids, config.num_iterations, config.seed).view(shape)
    from index_build.kmeans import spherical_kmeans

    parts: list[NDArray[np.float32]] = []
    for head in range(num_heads):
        parts += np.split(queries[head].float().cpu().numpy(), config.num_subspaces, axis=1)
    clusters = threads.map(
        lambda part: spherical_kmeans(part, config.num_centroids, config.num_iterations, config.seed), parts
    )
    return torch.from_numpy(np.stack(list(clusters))).view(shape).to(queries.device)
