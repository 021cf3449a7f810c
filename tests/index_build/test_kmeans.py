"""Spherical k-means, by FAISS and batched in torch: unit centroids for any points, and equally good fits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from index_build.kmeans_torch import POINTS_PER_CENTROID, sample_points, spherical_kmeans_batch

faiss = pytest.importorskip("faiss", reason="FAISS is not installed on macOS")
kmeans = pytest.importorskip("index_build.kmeans")
spherical_kmeans = kmeans.spherical_kmeans

Kmeans = Callable[..., NDArray[np.float32]]


@pytest.mark.parametrize(("num_gpus", "num_cpus", "expected"), [(0, 2, False), (1, 2, True), (1, 16, False)])
def test_faiss_uses_a_gpu_only_if_there_are_few_cpus(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, num_gpus: int, num_cpus: int, expected: bool
) -> None:
    made = []

    def on_gpu(memory: Any, width: int) -> Any:
        made.append(memory)
        return faiss.IndexFlatIP(width)

    monkeypatch.setattr(kmeans, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(kmeans, "available_cpus", lambda: num_cpus)
    monkeypatch.setattr(kmeans, "_gpu_memory", lambda: "kept")
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", on_gpu, raising=False)
    points = rng.standard_normal((500, 4)).astype(np.float32)
    centroids = spherical_kmeans(points, 8, 10, 1)
    assert made == ["kept"] * expected
    assert kmeans.faiss_version()["faiss_gpus"] == str(int(expected))
    monkeypatch.setattr(kmeans, "uses_gpu", lambda: False)
    np.testing.assert_allclose(centroids, spherical_kmeans(points, 8, 10, 1), atol=1e-6)


def by_faiss(points, num_centroids=8, seed=1):
    return spherical_kmeans(np.asarray(points, dtype=np.float32), num_centroids, 10, seed)


def by_torch(points, num_centroids=8, seed=1):
    sampled = torch.tensor(points, dtype=torch.float32)[None, sample_points(len(points), num_centroids, seed)]
    return spherical_kmeans_batch(sampled, num_centroids, 10, seed)[0].numpy()


both = pytest.mark.parametrize("kmeans", [by_faiss, by_torch])


@both
@pytest.mark.parametrize("num_points", [1, 7, 8, 9, 3000])
def test_centroids_are_finite_unit_vectors(kmeans: Kmeans, num_points: int, rng: np.random.Generator) -> None:
    centroids = kmeans(rng.standard_normal((num_points, 4)))
    assert centroids.shape == (8, 4)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-3)


def test_no_points_give_unit_centroids() -> None:
    for centroids in (by_faiss(np.zeros((0, 4))), by_torch(np.zeros((1, 4)))):
        np.testing.assert_allclose(centroids, np.eye(1, 4).repeat(8, axis=0), atol=0.01)


@both
def test_zero_and_repeated_points_give_unit_centroids(kmeans: Kmeans) -> None:
    points = np.zeros((500, 4), dtype=np.float32)
    points[:200] = [1, 0, 0, 0]
    centroids = kmeans(points)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-3)


@both
def test_well_separated_directions_are_found(kmeans: Kmeans, rng: np.random.Generator) -> None:
    directions = np.eye(8, dtype=np.float32)
    points = np.repeat(directions, 100, axis=0) * rng.uniform(0.1, 10, (800, 1)) + rng.normal(0, 1e-3, (800, 8))
    nearest = (kmeans(points) @ directions.T).max(axis=0)
    np.testing.assert_allclose(nearest, 1.0, atol=1e-2)


@both
def test_the_same_seed_gives_the_same_bits(kmeans: Kmeans, rng: np.random.Generator) -> None:
    points = rng.standard_normal((5000, 4))
    results = []
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        faiss.omp_set_num_threads(num_threads)
        results.append(kmeans(points))
        assert faiss.omp_get_max_threads() == num_threads, "what it was told is told again"
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(results[0], kmeans(points, seed=2))


def test_points_of_norm_zero_are_ignored(rng: np.random.Generator) -> None:
    points = rng.standard_normal((3000, 4)) - np.array([4, 0, 0, 0])
    points[np.arange(3000) % 10 > 0] = 0
    assert (by_torch(points)[:, 0] < -0.5).all()


def test_empty_clusters_are_reseeded() -> None:
    """Seeds are drawn from points of one direction only, so all centroids but one begin without points."""
    points = torch.eye(8).repeat(500, 1) + 1e-3 * torch.randn(4000, 8)
    points[:256] = points[0]
    centroids = spherical_kmeans_batch(points[None], 8, 20, 1)[0]
    assert len(centroids.argmax(1)[centroids.amax(1) > 0.99].unique()) == 8


def test_batched_problems_are_independent_of_the_batch_size(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = torch.from_numpy(rng.standard_normal((3, 2000, 4), np.float32))
    whole = spherical_kmeans_batch(points, 8, 10, 1)
    monkeypatch.setattr("index_build.kmeans_torch._SCORE_ELEMENTS", 1)
    torch.testing.assert_close(spherical_kmeans_batch(points, 8, 10, 1), whole)


def test_a_sample_repeats_no_point_and_takes_all_of_few_points() -> None:
    assert sorted(sample_points(100, 8, 1).tolist()) == list(range(100))
    large = sample_points(100_000, 8, 1)
    assert len(large.unique()) == len(large) == 8 * POINTS_PER_CENTROID
    assert large.float().mean() == pytest.approx(50_000, rel=0.05)


def query_parts(rng: np.random.Generator, subspace_dim: int) -> NDArray[np.float32]:
    """Return points distributed like queries: some dense groups, one stretched cloud, heavy tails."""
    centers = rng.standard_normal((12, subspace_dim)) * rng.uniform(0.5, 3, (12, 1))
    group = rng.choice(12, 40_000, p=rng.dirichlet(np.full(12, 0.4)))
    mixing = rng.standard_normal((subspace_dim, subspace_dim)) * np.exp(rng.uniform(-1.5, 1.5, subspace_dim))
    points = (centers[group] + 0.6 * rng.standard_t(3, (40_000, subspace_dim))) @ mixing
    return points.astype(np.float32)


def mean_distance(points: NDArray[np.float32], centroids: NDArray[np.float32]) -> float:
    """Return what both minimise: the mean over all points of 1 - cosine to the nearest centroid."""
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    return float((1 - (directions @ centroids.T).max(axis=1)).mean())


def test_batched_kmeans_fits_as_well_as_faiss(rng: np.random.Generator) -> None:
    num_centroids = 64
    parts = [query_parts(rng, 8) for _ in range(3)]
    sample = sample_points(40_000, num_centroids, 1).numpy()
    sampled = torch.from_numpy(np.stack([part[sample] for part in parts]))
    got = spherical_kmeans_batch(sampled, num_centroids, 10, 1).numpy()
    ratios = [
        mean_distance(part, centroids) / mean_distance(part, by_faiss(part, num_centroids))
        for part, centroids in zip(parts, got, strict=True)
    ]
    assert max(ratios) < 1.01, ratios
