"""Selections that drift as those of decode steps do, for tests of caches of their rows."""

import numpy as np
from numpy.typing import NDArray

Step = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


def make_step(
    rng: np.random.Generator,
    popularity: NDArray[np.float64],  # [num_contexts, num_index_heads, context_len], drifts with every step
    batch: int,
    max_top_k: int,
) -> Step:
    """Return kv_indices [batch, num_index_heads, max_top_k] (garbage after each valid_len), valid_len, context_ids."""
    num_contexts, num_index_heads, context_len = popularity.shape
    popularity += 0.3 * rng.standard_normal(popularity.shape)
    context_ids = rng.integers(-1, num_contexts, batch).astype(np.int32)
    valid_len = rng.integers(0, min(max_top_k, context_len) + 1, (batch, num_index_heads)).astype(np.int32)
    valid_len[rng.random(valid_len.shape) < 0.5] = min(max_top_k, context_len)
    kv_indices = rng.integers(-(2**31), 2**31, (batch, num_index_heads, max_top_k)).astype(np.int32)
    for row in range(batch):
        for head in range(num_index_heads):
            scores = popularity[context_ids[row], head] + 0.3 * rng.standard_normal(context_len)
            best = np.argsort(-scores)[: valid_len[row, head]]
            kv_indices[row, head, : len(best)] = np.sort(best)
    return kv_indices, valid_len, context_ids


def masked(step: Step) -> Step:
    """Return the same selections, with -1 where nothing is selected."""
    kv_indices, valid_len, context_ids = step
    selected = np.arange(kv_indices.shape[-1]) < valid_len[..., None]
    return np.where(selected & (context_ids >= 0)[:, None, None], kv_indices, np.int32(-1)), valid_len, context_ids
