"""Hit rates of caches of chosen rows, and the share of a choice that the previous step had made too."""

import torch
from torch import Tensor

SIZES = (1, 2, 3, 4)  # of a cache, in multiples of the rows that a step chooses
_NEVER = 0


def count_hits(
    chosen: Tensor,  # [num_caches, num_steps, top_k] int, row numbers; one cache for each KV head of each layer
    context_len: int,
) -> dict[str, float]:
    """Return the shares of the chosen rows that an LRU cache holds, and that the previous step chose too.

    They are counted over the last three quarters of the steps. An LRU cache holds the rows that were chosen last, so a
    row's last step decides whether it is there. If only some of a step's rows fit, all have the same probability.
    """
    num_caches, num_steps, top_k = chosen.shape
    chosen = chosen.long()
    # the step at which each row was last chosen, counted from 1
    last = torch.zeros(num_caches, context_len, dtype=torch.long, device=chosen.device)
    rows_of = torch.zeros(num_caches, num_steps + 1, device=chosen.device)  # number of rows with that last step
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
