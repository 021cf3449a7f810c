"""A small k-means over keys, for selectors that cluster them."""

import torch
from torch import Tensor


def kmeans(points: Tensor, num_clusters: int, num_iterations: int, seed: int) -> Tensor:
    """Centroids by Lloyd's iterations from k-means++ seeds; the same for the same points, clusters and seed.

    points: [num_points, width] float32, at least one -> [num_clusters, width]. A cluster that loses its last point
    stays where it is; where there are fewer distinct points than clusters, centroids repeat.
    """
    centroids = _spread_seeds(points, num_clusters, torch.Generator().manual_seed(seed))
    for _ in range(num_iterations):
        nearest = nearest_centroids(points, centroids)
        counts = torch.bincount(nearest, minlength=num_clusters)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        centroids = torch.where((counts > 0)[:, None], sums / counts.clamp_min(1)[:, None], centroids)
    return centroids


def nearest_centroids(points: Tensor, centroids: Tensor) -> Tensor:
    """The centroid at the least Euclidean distance; of equal ones the first.

    points: [..., num_points, width], centroids: [..., num_clusters, width] -> [..., num_points] int64.
    """
    products = points @ centroids.transpose(-1, -2)
    return (0.5 * centroids.square().sum(-1)[..., None, :] - products).argmin(-1)


def _spread_seeds(points: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next seed is a point, with a probability by its squared distance from the seeds so far."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    distance = (points - points[chosen]).square().sum(-1)
    for _ in range(num_clusters - 1):
        # where all points are seeds already, any may repeat
        chances = distance if distance.any() else torch.ones_like(distance)
        new = torch.multinomial(chances, 1, generator=generator)
        chosen = torch.cat([chosen, new])
        distance = torch.minimum(distance, (points - points[new]).square().sum(-1))
    return points[chosen]
