"""Score every centroid against every key and keep the table: quantised rows, or the L best of each row.

Scores are summed in float64 and rounded once, so that every machine, blocking and thread count gets the same
bits from the same centroids.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.table.lists import ListTable
from csattn.table.rows import RowTable, pack_codes, row_bytes

# A row's scores beyond this many standard deviations are clipped when it has only 4 bits.
_CLIP_SIGMAS = 4.0
_LARGEST_HALF = 65504.0


def centroid_scores(
    codebook: Tensor,  # [num_centroids, subspace_dim] float32
    keys: Tensor,  # [context_len, subspace_dim] float32
) -> Tensor:
    """c_j . k_i for all pairs: [num_centroids, context_len] float32."""
    return (codebook.double() @ keys.double().T).float()


def make_row_table(
    codebooks: NDArray[np.float32],  # [num_index_heads, num_subspaces, num_centroids, subspace_dim]
    keys: list[Tensor],  # per index head [context_len, head_dim] float32, centred, in the key basis
    score_bits: int,
) -> RowTable:
    """Every key's score for every centroid, as symmetric codes with one scale per row."""
    num_heads, num_subspaces, num_centroids, subspace_dim = codebooks.shape
    context_len = keys[0].shape[0]
    shape = (num_heads, num_subspaces, num_centroids, row_bytes(context_len, score_bits))
    codes = np.empty(shape, dtype=np.int8) if score_bits == 8 else np.empty(shape, dtype=np.uint8)
    scales = np.empty((num_heads, num_subspaces, num_centroids), dtype=np.float32)
    for head in range(num_heads):
        for subspace in range(num_subspaces):
            part = keys[head][:, subspace * subspace_dim : (subspace + 1) * subspace_dim]
            scores = centroid_scores(torch.from_numpy(codebooks[head, subspace]), part)
            row_codes, row_scales = quantise_rows(scores, score_bits)
            codes[head, subspace] = pack_codes(row_codes.numpy(), score_bits)
            scales[head, subspace] = row_scales.numpy()
    return RowTable(codes=codes, scales=scales, context_len=context_len)


def quantise_rows(scores: Tensor, score_bits: int) -> tuple[Tensor, Tensor]:
    """scores [num_rows, context_len] -> int8 codes of the same shape, float32 scales [num_rows].

    A row whose scores are all zero has scale 0.
    """
    largest_code = 127 if score_bits == 8 else 7
    limit = scores.abs().amax(1).double()
    if score_bits == 4:
        deviation = scores.double().std(1, correction=0)
        limit = torch.minimum(limit, _CLIP_SIGMAS * deviation + scores.double().mean(1).abs())
    scales = (limit / largest_code).float()
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    codes = (scores / steps).round_().clamp_(-largest_code, largest_code)
    return codes.to(torch.int8), scales


def make_list_table(
    codebooks: NDArray[np.float32],
    keys: list[Tensor],
    list_len: int,
) -> ListTable:
    """The `list_len` best keys of every centroid, ordered by (stored score descending, index ascending)."""
    num_heads, num_subspaces, num_centroids, subspace_dim = codebooks.shape
    shape = (num_heads, num_subspaces, num_centroids, list_len)
    indices, scores = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float16)
    for head in range(num_heads):
        for subspace in range(num_subspaces):
            part = keys[head][:, subspace * subspace_dim : (subspace + 1) * subspace_dim]
            rows = centroid_scores(torch.from_numpy(codebooks[head, subspace]), part).numpy()
            indices[head, subspace], scores[head, subspace] = top_l(rows, list_len)
    return ListTable(indices=indices, scores=scores, context_len=keys[0].shape[0])


def top_l(rows: NDArray[np.float32], list_len: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Indices and float16 scores [num_rows, list_len] of each row's best entries, in the lists' order."""
    halves = np.clip(rows, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16) + np.float16(0)  # no -0.0
    bits = halves.view(np.int16).astype(np.int64)
    ordinals = np.where(bits < 0, -(bits & 0x7FFF), bits)  # ordered as the scores are
    # One integer holds score and index, so that a plain sort gives the total order.
    keyed = (-ordinals << 32) + np.arange(rows.shape[1])
    best = np.sort(np.partition(keyed, list_len - 1, axis=1)[:, :list_len], axis=1)
    indices = (best & 0xFFFFFFFF).astype(np.int32)
    return indices, np.take_along_axis(halves, indices.astype(np.int64), axis=1)
