"""The batched k-means agrees with its definition and handles degenerate points."""

import numpy as np
import pytest
import torch

from csattn.selectors.key_clusters import kmeans, nearest_centroids


def spread(points: torch.Tensor, centroids: torch.Tensor) -> float:
    """Return the mean squared distance of points from their nearest centroids."""
    return float(torch.cdist(points, centroids).square().amin(1).mean())


@pytest.mark.parametrize("num_clusters", [1, 2, 9])
def test_each_iteration_moves_centroids_to_the_mean_of_their_points(num_clusters) -> None:
    points = torch.randn(1, 40, 3)
    for num_iterations in range(4):
        before = kmeans(points, num_clusters, num_iterations, seed=5)[0]
        after = kmeans(points, num_clusters, num_iterations + 1, seed=5)[0]
        nearest = np.argmin(((points[0, :, None] - before) ** 2).sum(-1).numpy(), axis=1)
        want = [points[0, nearest == j].mean(0) if (nearest == j).any() else before[j] for j in range(num_clusters)]
        torch.testing.assert_close(after, torch.stack(want))
        assert spread(points[0], after) <= spread(points[0], before) + 1e-6


def test_seeds_are_points_of_different_clusters() -> None:
    """Of three tight groups, k-means++ puts a seed into each."""
    centres = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]])
    points = (centres[:, None] + 0.01 * torch.randn(3, 20, 2)).view(1, 60, 2)
    seeds = kmeans(points, 3, 0, seed=1)[0]
    assert {int(torch.cdist(seed[None], centres).argmin()) for seed in seeds} == {0, 1, 2}
    assert (torch.cdist(seeds, points[0]).amin(1) == 0).all()


def test_degenerate_points_give_finite_deterministic_centroids() -> None:
    points = torch.randn(3, 30, 4)
    points[1] = points[1, :1]  # all the same point
    points[2, 5:] = points[2, :1]  # fewer distinct points than clusters
    centroids = kmeans(points, 8, 10, seed=3)
    assert torch.isfinite(centroids).all()
    assert spread(points[1], centroids[1]) < 1e-6
    assert spread(points[2], centroids[2]) < 1e-6
    assert torch.equal(centroids, kmeans(points, 8, 10, seed=3))


def test_of_equally_near_centroids_the_first_is_chosen() -> None:
    centroids = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert nearest_centroids(torch.tensor([[2.0, 1.0], [-3.0, 0.0]]), centroids).tolist() == [0, 2]
