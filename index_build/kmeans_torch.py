"""Batched spherical k-means in torch, which solves many problems at once, as a GPU needs it.

A layer of an 8B model has 128 problems of half a million points. Like FAISS, this works on a sample of the points, but
on a larger one. Nothing here adds floats in an order that changes between runs.
"""

import torch
from torch import Tensor

POINTS_PER_CENTROID = 1024  # of the sample; FAISS takes 256
_SEED_POINTS_PER_CENTROID = 32  # at the start of the sample, from which the seeds are chosen
_SEED_CANDIDATES = 4  # tried for every seed
_CHUNK = 1024  # points that one matrix product sums over
_SCORE_ELEMENTS, _SCORE_ELEMENTS_ON_GPU = 1 << 24, 1 << 28  # the most scores of problems that share a pass
# Below this norm the direction of a query part is rounding error: it is not clustered.
SMALLEST_NORM = 1e-12
_NUDGE = 1e-3  # scale of the offset between the two centroids of a cluster that is split


def sample_points(num_points: int, num_centroids: int, seed: int) -> Tensor:
    """Return the indices of the points to cluster [num_sampled] int64, in random order: all points if they are few."""
    order = torch.randperm(num_points, generator=torch.Generator().manual_seed(seed))
    return order[: POINTS_PER_CENTROID * num_centroids]


def spherical_kmeans_batch(
    points: Tensor,  # [num_problems, num_points, subspace_dim] float32, in random order; at least one
    num_centroids: int,
    num_iterations: int,
    seed: int,
) -> Tensor:
    """Cluster the directions of each problem's points: unit centroids [num_problems, num_centroids, subspace_dim].

    Points of norm zero have no direction and are left out. With fewer directions than centroids, some centroids
    nearly coincide. Deterministic for a seed on one kind of device; another may round differently.
    """
    num_elements = _SCORE_ELEMENTS_ON_GPU if points.is_cuda else _SCORE_ELEMENTS
    problems_at_once = max(1, num_elements // (points.shape[1] * num_centroids))
    starts = range(0, len(points), problems_at_once)
    some = (points[start : start + problems_at_once] for start in starts)
    return torch.cat([_cluster(problems, num_centroids, num_iterations, seed) for problems in some])


def _cluster(points: Tensor, num_centroids: int, num_iterations: int, seed: int) -> Tensor:
    norms = points.norm(dim=2, keepdim=True)
    counts = (norms > SMALLEST_NORM).float()  # 1, or 0 for a point that is left out
    directions = points / torch.where(counts > 0, norms, torch.inf)
    generator = torch.Generator().manual_seed(seed)
    num_seed_points = _SEED_POINTS_PER_CENTROID * num_centroids
    centroids = _choose_seeds(directions[:, :num_seed_points], counts[:, :num_seed_points], num_centroids, generator)
    drawn = torch.randn(num_centroids, points.shape[2], dtype=torch.float32, generator=generator)
    nudges = drawn.to(points.device) * _NUDGE
    chunks = _Chunks(directions, counts)
    for _ in range(num_iterations):
        sums, sizes, losses = chunks.sum_clusters(centroids)
        centroids = _normalised(_split_for_empty(sums, sizes, losses, nudges))
    return centroids


def _choose_seeds(directions: Tensor, counts: Tensor, num_centroids: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++: each seed is the best of some candidates, drawn by their squared distance to the seeds before.

    A draw is the argmin of exponential variables divided by their rates, the distances; it needs no prefix sum.
    """
    num_problems, num_points, width = directions.shape
    transposed = directions.mT.contiguous()
    distances = 2.0 * counts[:, None, :, 0]  # [num_problems, 1, num_points]: squared, to the nearest seed, halved
    seeds = directions.new_empty(num_problems, num_centroids, width)
    for chosen in range(num_centroids):
        draws = torch.empty(_SEED_CANDIDATES, num_points, dtype=torch.float32).exponential_(generator=generator)
        draws = draws.to(directions.device)
        candidate_ids = (distances / draws).argmax(2)
        candidates = directions.gather(1, candidate_ids[:, :, None].expand(-1, -1, width))
        remaining = torch.minimum(distances, (1.0 - candidates @ transposed).clamp_min_(0.0))
        best = remaining.sum(2).argmin(1)[:, None, None]
        seeds[:, chosen] = candidates.gather(1, best.expand(-1, -1, width))[:, 0]
        distances = remaining.gather(1, best.expand(-1, -1, num_points))
    return _normalised(seeds)


class _Chunks:
    """The points of all problems, cut into chunks that are assigned and summed by matrix products."""

    def __init__(self, directions: Tensor, counts: Tensor) -> None:
        num_problems, num_points, width = directions.shape
        padded = directions.new_zeros(num_problems, -(-num_points // _CHUNK) * _CHUNK, width + 2)
        padded[:, :num_points, :width] = directions
        padded[:, :num_points, width : width + 1] = counts
        # the last two columns: whether the point counts, and its distance from its centroid
        self._rows = padded.view(num_problems, -1, _CHUNK, width + 2)
        self._columns = self._rows[..., :width].mT.contiguous()

    def sum_clusters(self, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each cluster's sum of directions [..., subspace_dim], their number, and the sum of their distances.

        centroids: [num_problems, num_centroids, subspace_dim]; results: [num_problems, num_centroids, ...] float32.
        """
        num_centroids, width = centroids.shape[1:]
        scores = centroids[:, None].expand(-1, self._rows.shape[1], -1, -1) @ self._columns
        nearest, assignment = scores.max(2, keepdim=True)
        self._rows[..., width + 1] = (1.0 - nearest[:, :, 0]) * self._rows[..., width]
        ids = torch.arange(num_centroids, device=scores.device)[:, None]
        members = torch.eq(assignment, ids, out=scores)  # 1.0 where a point belongs to a centroid
        totals = (members @ self._rows).sum(1, dtype=torch.float64).float()
        return totals[..., :width], totals[..., width], totals[..., width + 1]


def _split_for_empty(sums: Tensor, sizes: Tensor, losses: Tensor, nudges: Tensor) -> Tensor:
    """Move every empty cluster's centroid next to that of a cluster with a large summed distance, the largest first."""
    empty = sizes < 0.5
    worst_first = losses.masked_fill(empty, -1.0).argsort(dim=1, descending=True, stable=True)
    num_full = (~empty).sum(1, keepdim=True).clamp_min(1)
    rank = (empty.cumsum(1) - 1).clamp_min(0) % num_full
    donors = worst_first.gather(1, rank)[:, :, None].expand_as(sums)
    centroids = _normalised(sums)
    return torch.where(empty[:, :, None], centroids.gather(1, donors) + nudges, centroids)


def _normalised(vectors: Tensor) -> Tensor:
    """Normalise to unit vectors; to the first axis for zero vectors (a mean of opposite points, or of no points)."""
    norms = vectors.norm(dim=2, keepdim=True)
    first_axis = torch.eye(1, vectors.shape[2], dtype=torch.float32, device=vectors.device)
    return torch.where(norms > SMALLEST_NORM, vectors / norms.clamp_min(SMALLEST_NORM), first_axis)
