"""The baselines: StreamIndex's partition-merge as its paper describes it, and paths that materialise all scores.

Written from the description, without any of its code. Indices are int64 and scores float32, as published.
"""

import torch
from torch import Tensor

from csattn.lightning import Operands, score_keys

_EXACT_ROWS = 256  # queries of `exact_choice` whose per-head scores are in memory at a time


def partition_merge(
    operands: Operands,
    k: int,
    ratio: int | None,  # None: every query sees every key
    query_chunk: int,
    key_chunk: int,
    *,
    score_dtype: torch.dtype = torch.float32,
    merge: bool = True,  # False: the first chunk's choice is final
    skip_short: bool = False,  # skip chunks of k keys or fewer
) -> tuple[Tensor, Tensor]:
    """Choose k keys for each query: score a tile, mask it, torch.topk, append to the keys kept, torch.topk again."""
    num_queries, num_keys = len(operands.q), len(operands.k)
    device = operands.q.device
    indices = torch.empty(num_queries, k, dtype=torch.int64, device=device)
    scores = torch.empty(num_queries, k, device=device)
    for first in range(0, num_queries, query_chunk):
        rows = slice(first, min(first + query_chunk, num_queries))
        part = operands.of_queries(rows)
        kept = torch.full((len(part.q), k), -torch.inf, dtype=score_dtype, device=device)
        kept_indices = torch.full(kept.shape, -1, dtype=torch.int64, device=device)
        for start in range(0, num_keys, key_chunk):
            keys = range(start, min(start + key_chunk, num_keys))
            if skip_short and len(keys) <= k:
                continue
            tile = _score(part, keys).to(score_dtype)
            if ratio is not None:
                tile = tile.masked_fill(_illegal(rows, keys, ratio, device), -torch.inf)
            best, at = tile.topk(min(k, len(keys)), dim=1)
            kept, place = torch.cat((kept, best), dim=1).topk(k, dim=1)
            kept_indices = torch.cat((kept_indices, at + start), dim=1).gather(1, place)
            if not merge:
                break
        indices[rows] = kept_indices.masked_fill(kept.isinf(), -1)
        scores[rows] = kept.float()
    return indices, scores


def materialise(operands: Operands, k: int, ratio: int) -> Tensor:
    """Choose with the eager path and float32 operands, which holds [num_queries, num_heads, num_keys] twice."""
    rows, keys = slice(0, len(operands.q)), range(len(operands.k))
    scores = score_keys(operands).masked_fill(_illegal(rows, keys, ratio, operands.q.device), -torch.inf)
    best, indices = scores.topk(min(k, len(keys)), dim=1)
    return indices.masked_fill(best.isinf(), -1)


def materialise_summed(operands: Operands, k: int) -> Tensor:
    """Choose from all scores, with heads summed inside the kernel, by torch.topk; every query sees every key."""
    return _score(operands, range(len(operands.k))).topk(k, dim=1).indices


def exact_choice(operands: Operands, k: int, ratio: int) -> Tensor:
    """Choose like `materialise`, but a few queries at a time: [num_queries, k], -1 padded."""
    chosen = torch.full((len(operands.q), k), -1, dtype=torch.int64, device=operands.q.device)
    keys = range(len(operands.k))
    for first in range(0, len(operands.q), _EXACT_ROWS):
        rows = slice(first, min(first + _EXACT_ROWS, len(operands.q)))
        per_head = torch.einsum("qhd,kd->qhk", operands.q[rows].float(), operands.k.float()).relu_()
        scores = torch.einsum("qhk,qh->qk", per_head, operands.weights[rows].float())
        if operands.key_scale is not None:
            scores *= operands.key_scale
        scores = scores.masked_fill(_illegal(rows, keys, ratio, scores.device), -torch.inf)
        best, indices = scores.topk(min(k, len(keys)), dim=1)
        chosen[rows, : indices.shape[1]] = indices.masked_fill(best.isinf(), -1)
    return chosen


def _illegal(rows: slice, keys: range, ratio: int, device: torch.device) -> Tensor:
    lens = (torch.arange(rows.start, rows.stop, device=device) + 1) // ratio
    return torch.arange(keys.start, keys.stop, device=device) >= lens[:, None]


def _score(operands: Operands, keys: range) -> Tensor:
    if operands.q.is_cuda:
        from bench.lightning.published_kernel import score_chunk

        scores = score_chunk(operands, keys)
    else:
        scores = score_keys(Operands(operands.q, operands.k[keys.start : keys.stop], operands.weights))
    return scores if operands.key_scale is None else scores * operands.key_scale[keys.start : keys.stop]
