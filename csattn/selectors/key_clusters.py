"""A small k-means over keys, for selectors that cluster them."""

import torch
from torch import Tensor


def kmeans(points: Tensor, num_clusters: int, num_iterations: int, seed: int) -> Tensor:
    """Return each set's centroids by Lloyd's iterations from k-means++ seeds; deterministic for a kind of device.

    points: [num_sets, num_points, width] float32, at least one point -> [num_sets, num_clusters, width]. An empty
    cluster keeps its centroid. With fewer distinct points than clusters, centroids repeat.
    """
    seeds = _kmeans_plus_plus(points, num_clusters, torch.Generator(points.device).manual_seed(seed))
    return torch.stack([_lloyd(*of_set, num_iterations) for of_set in zip(points, seeds, strict=True)])


def nearest_centroids(points: Tensor, centroids: Tensor) -> Tensor:
    """Return the index of the centroid at the least Euclidean distance; the first one on ties.

    points: [..., num_points, width], centroids: [..., num_clusters, width] -> [..., num_points] int64.
    """
    products = points @ centroids.transpose(-1, -2)
    return (0.5 * centroids.square().sum(-1)[..., None, :] - products).argmin(-1)


def _kmeans_plus_plus(points: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: draw each next seed among the points in proportion to the squared distance to the nearest seed."""
    sets = torch.arange(len(points), device=points.device)
    seeds = [points[sets, torch.randint(points.shape[1], (len(points),), generator=generator, device=points.device)]]
    distance = torch.full(points.shape[:2], torch.inf, dtype=torch.float32, device=points.device)
    for _ in range(num_clusters - 1):
        distance = torch.minimum(distance, (points - seeds[-1][:, None]).square().sum(-1))
        has_candidates = distance.amax(1, keepdim=True) > 0  # if all points are seeds already, any may repeat
        new = torch.multinomial(torch.where(has_candidates, distance, 1.0), 1, generator=generator)[:, 0]
        seeds.append(points[sets, new])
    return torch.stack(seeds, dim=1)


def _lloyd(points: Tensor, centroids: Tensor, num_iterations: int) -> Tensor:
    """points: [num_points, width], centroids: [num_clusters, width] -> centroids."""
    for _ in range(num_iterations):
        nearest = nearest_centroids(points, centroids)
        counts = torch.bincount(nearest, minlength=len(centroids))[:, None]
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
    return centroids
