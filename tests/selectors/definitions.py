"""Definitions of what each selector chooses: one query head and one row at a time, in float64."""

import numpy as np

from tests.selectors.requests import SCALE


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def best_rows(group_scores: np.ndarray, resident: list[int], top_k: int) -> list[int]:
    """Return the rows with the largest group scores, without resident ones; ties go to the first row."""
    free = [row for row in range(len(group_scores)) if row not in resident]
    return sorted(sorted(free, key=lambda row: -group_scores[row])[:top_k])


def exact_group_scores(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return group scores [num_keys]. q: [group_size, head_dim], keys: [num_keys, head_dim]."""
    return sum(softmax(SCALE * keys @ head) for head in q)


def quest_group_scores(q: np.ndarray, keys: np.ndarray, context_len: int, page_size: int) -> np.ndarray:
    pages = [
        range(start, min(start + page_size, end))
        for first, end in ((0, context_len), (context_len, len(keys)))
        for start in range(first, end, page_size)
    ]
    group_scores = np.zeros(len(keys))
    for head in q:
        bounds = [max_product(head, keys[list(page)]) for page in pages]
        for page, share in zip(pages, softmax(SCALE * np.array(bounds)), strict=True):
            group_scores[list(page)] += share
    return group_scores


def max_product(q: np.ndarray, keys: np.ndarray) -> float:
    """Return the largest inner product of q with a point in the keys' bounding box."""
    return np.maximum(q * keys.min(0), q * keys.max(0)).sum()


def sparq_logits(q: np.ndarray, keys: np.ndarray, num_components: int) -> np.ndarray:
    """Return approximate logits [group_size, num_keys]."""
    size = np.abs(q).sum(0)
    used = sorted(range(len(size)), key=lambda i: -size[i])[:num_components]
    head_dim = 1 / SCALE**2
    temperatures = [np.sqrt(head_dim * np.abs(head[used]).sum() / np.abs(head).sum()) for head in q]
    return np.stack([keys[:, used] @ head[used] / t for head, t in zip(q, temperatures, strict=True)])


def pqcache_group_scores(q: np.ndarray, keys: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return group scores [num_keys]. centroids: [num_subspaces, num_centroids, subspace_dim]."""
    rebuilt = np.empty_like(keys)
    width = centroids.shape[2]
    for row, key in enumerate(keys):
        for b, of_subspace in enumerate(centroids):
            part = slice(b * width, (b + 1) * width)
            rebuilt[row, part] = of_subspace[np.argmin(((of_subspace - key[part]) ** 2).sum(1))]
    return exact_group_scores(q, rebuilt)


def magicpig_rows(
    q: np.ndarray, keys: np.ndarray, mean: np.ndarray, projections: np.ndarray, num_tables: int
) -> dict[int, float]:
    """Return the rows in q's bucket in at least two tables, each with the probability of that. q: [head_dim]."""
    num_bits = projections.shape[1] // num_tables
    taken = {}
    for row, key in enumerate(keys - mean):
        signs = [((x @ projections) > 0).reshape(num_tables, num_bits) for x in (q, key)]
        if (signs[0] == signs[1]).all(1).sum() >= 2:
            # a key equal to the mean has no direction: each of its signs agrees with a query's with probability 1/2
            cosine = q @ key / np.linalg.norm(q) / np.linalg.norm(key) if key.any() else 0.0
            angle = np.arccos(cosine)
            meets = (1 - angle / np.pi) ** num_bits
            none, one = (1 - meets) ** num_tables, num_tables * meets * (1 - meets) ** (num_tables - 1)
            taken[row] = 1 - none - one
    return taken


class HeavyHitters:
    """H2O in one KV head: the rows that are kept, and the attention that each has received."""

    def __init__(self, keys: np.ndarray, received: np.ndarray, resident: list[int], top_k: int):
        self.keys, self.top_k, self.resident = list(keys), top_k, resident
        self.received = {row: received[row] for row in best_rows(received, resident, top_k)}
        self.recently: dict[int, float] = {}

    def leave(self, row: int) -> None:
        self.received[row] = self.recently.pop(row, 0.0)
        if len(self.received) > self.top_k:
            del self.received[min(self.received, key=lambda kept: (self.received[kept], -kept))]

    def step(self, q: np.ndarray, recent: list[int]) -> list[int]:
        """Return the rows kept before this step, and add its attention. recent: the tail's resident rows, in `keys`."""
        kept = sorted(self.received)
        rows = [*self.resident, *kept, *recent]
        group_scores = exact_group_scores(q, np.stack([self.keys[row] for row in rows]))
        for row, weight in zip(rows, group_scores, strict=True):
            if row in self.received:
                self.received[row] += weight
            elif row in recent:
                self.recently[row] = self.recently.get(row, 0.0) + weight
        return kept
