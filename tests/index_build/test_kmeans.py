"""Spherical k-means: unit centroids, whatever the points."""

import numpy as np
import pytest

from index_build.kmeans import set_kmeans_threads, spherical_kmeans


def kmeans(points, num_centroids=8, seed=1):
    return spherical_kmeans(np.asarray(points, dtype=np.float32), num_centroids, 10, seed)


@pytest.mark.parametrize("num_points", [0, 1, 7, 8, 9, 3000])
def test_centroids_are_finite_unit_vectors(num_points: int, rng: np.random.Generator) -> None:
    centroids = kmeans(rng.standard_normal((num_points, 4)))
    assert centroids.shape == (8, 4)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-3)


def test_zero_and_repeated_points_do_no_harm() -> None:
    points = np.zeros((500, 4), dtype=np.float32)
    points[:200] = [1, 0, 0, 0]
    centroids = kmeans(points)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-3)


def test_well_separated_directions_are_found(rng: np.random.Generator) -> None:
    directions = np.eye(8, dtype=np.float32)
    points = np.repeat(directions, 100, axis=0) * rng.uniform(0.1, 10, (800, 1)) + rng.normal(0, 1e-3, (800, 8))
    nearest = (kmeans(points) @ directions.T).max(axis=0)
    np.testing.assert_allclose(nearest, 1.0, atol=1e-2)


def test_the_same_seed_gives_the_same_bits_on_any_number_of_threads(rng: np.random.Generator) -> None:
    points = rng.standard_normal((5000, 4))
    results = []
    for num_threads in (1, 2):
        set_kmeans_threads(num_threads)
        results.append(kmeans(points))
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(results[0], kmeans(points, seed=2))
