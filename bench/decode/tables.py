"""Tables of a tiled context, made on the device: what `index_build` would make of the same keys and centroids.

Scores are summed in float32 here, so a score that lies between two codes may get the other one.
"""

import torch
from torch import Tensor

from bench.decode.recorded import WideIndex
from csattn.table.rows import KEYS_PER_BLOCK

KEYS_AT_A_TIME = 1 << 17  # bounds the memory of scores that are not yet packed


def row_codes(keys: Tensor, index: WideIndex) -> Tensor:
    """Codes of 4 bits as `csattn.table.rows.RowTable` has them.

    keys: [num_kv_heads, context_len, head_dim] -> [num_index_heads, num_subspaces, num_centroids, context_len // 2].
    """
    context_len = keys.shape[1]
    assert index.config.score_bits == 4 and context_len % KEYS_PER_BLOCK == 0, "whole blocks of 4-bit codes only"
    steps = torch.from_numpy(index.scales).to(keys.device)
    steps = torch.where(steps > 0, steps, 1.0)[..., None]
    codes = torch.empty(*steps.shape[:3], context_len // 2, dtype=torch.uint8, device=keys.device)
    for head in range(codes.shape[0]):
        for start in range(0, context_len, KEYS_AT_A_TIME):
            scores = centroid_scores(keys, index, head, start)
            quantised = scores.div_(steps[head]).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
            low, high = quantised.view(*quantised.shape[:2], -1, 2, KEYS_PER_BLOCK // 2).unbind(3)
            packed = (low | high << 4).flatten(2)
            codes[head, :, :, start // 2 : start // 2 + packed.shape[2]] = packed
    return codes


def score_lists(keys: Tensor, index: WideIndex) -> tuple[Tensor, Tensor]:
    """Scores (float16) and kv indices (int32) as `csattn.table.lists.ListTable` has them.

    keys: [num_kv_heads, context_len, head_dim] -> two of [num_index_heads, num_subspaces, num_centroids, list_len].
    """
    context_len = keys.shape[1]
    list_len = index.config.list_entries(context_len)
    shape = (*index.codebooks.shape[:3], list_len)
    scores = torch.empty(shape, dtype=torch.float16, device=keys.device)
    indices = torch.empty(shape, dtype=torch.int32, device=keys.device)
    for head in range(shape[0]):
        parts = [centroid_scores(keys, index, head, start).half() for start in range(0, context_len, KEYS_AT_A_TIME)]
        for subspace in range(shape[1]):
            row = torch.cat([part[subspace] for part in parts], dim=1) + 0.0  # no -0.0
            ordered = row.sort(dim=1, descending=True, stable=True)
            scores[head, subspace] = ordered.values[:, :list_len]
            indices[head, subspace] = ordered.indices[:, :list_len]
    return scores, indices


def centroid_scores(keys: Tensor, index: WideIndex, head: int, start: int) -> Tensor:
    """One head's scores of some keys: [num_subspaces, num_centroids, num_keys] float32."""
    num_heads, num_subspaces = index.codebooks.shape[:2]
    kv_head = head // (num_heads // keys.shape[0])
    rows = keys[kv_head, start : start + KEYS_AT_A_TIME].float()
    mean, basis, codebooks = (
        torch.from_numpy(array[head]).to(keys.device) for array in (index.key_mean, index.key_basis, index.codebooks)
    )
    parts = ((rows - mean) @ basis).view(len(rows), num_subspaces, -1)
    return torch.einsum("mcd,nmd->mcn", codebooks, parts)


def distinct_rows(q: Tensor, index: WideIndex) -> float:
    """Rows or lists that a search reads per index head, each counted once: mean over steps and heads.

    q: [num_steps, num_q_heads, head_dim].
    """
    basis, codebooks = (torch.from_numpy(array).to(q.device) for array in (index.query_basis, index.codebooks))
    num_heads, num_subspaces, num_centroids = codebooks.shape[:3]
    grouped = q.float().view(len(q), num_heads, -1, q.shape[2])
    parts = torch.einsum("shgd,hde->shge", grouped, basis).unflatten(3, (num_subspaces, -1))
    ids = torch.einsum("shgme,hmce->shgmc", parts, codebooks).argmax(-1)  # [num_steps, num_heads, group, subspaces]
    taken = torch.zeros(len(q), num_heads, num_subspaces, num_centroids, device=q.device)
    return float(taken.scatter_(3, ids.permute(0, 1, 3, 2), 1.0).sum((2, 3)).mean())
