"""What caches of chosen rows would hit, and how much of a choice the step before has made already."""

import torch
from torch import Tensor

SIZES = (1, 2, 3, 4)  # of a cache, in multiples of the rows that a step chooses
_NEVER = 0


def count_hits(
    chosen: Tensor,  # [num_caches, num_steps, top_k] int: rows, one cache for each KV head of each layer
    context_len: int,
) -> dict[str, float]:
    """Shares of the chosen rows, over the last three quarters of the steps: found in a cache, chosen a step before.

    Of a least-recently-used cache it matters only when a row was last chosen: the cache holds those that were last.
    Where not all rows of one step fit, each has the same chance.
    """
    num_caches, num_steps, top_k = chosen.shape
    chosen = chosen.long()
    last = torch.zeros(num_caches, context_len, dtype=torch.long, device=chosen.device)  # the step, from 1 on
    rows_of = torch.zeros(num_caches, num_steps + 1, device=chosen.device)  # whose last step that was
    first = num_steps // 4
    hits, shared, counted = torch.zeros(len(SIZES), device=chosen.device), 0.0, 0
    for step in range(num_steps):
        rows = chosen[:, step]
        used = last.gather(1, rows)
        if step >= max(1, first):
            newer = rows_of.flip(1).cumsum(1).flip(1) - rows_of
            for i, size in enumerate(SIZES):
                fitting = ((size * top_k - newer) / rows_of.clamp_min(1)).clamp(0, 1)
                fitting[:, _NEVER] = 0.0
                hits[i] += fitting.gather(1, used).sum()
            shared += float((used == step).sum())
            counted += rows.numel()
        rows_of.scatter_add_(1, used, -torch.ones_like(used, dtype=rows_of.dtype))
        rows_of[:, _NEVER] = 0.0
        rows_of[:, step + 1] = float(top_k)
        last.scatter_(1, rows, step + 1)
    found = {f"hit_share_{size}k": float(hit) / max(1, counted) for size, hit in zip(SIZES, hits, strict=True)}
    return {**found, "shared_with_last_step": shared / max(1, counted)}
