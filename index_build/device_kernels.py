"""Scores of all subspaces on a GPU, in Triton. Definition: `reference.py`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

_CENTROIDS = 64  # of a program; fewer are padded
_TILE = 64  # keys
_TILES = 8  # in a program, one after the other


def score_keys(
    codebooks: Tensor,  # [num_parts, num_centroids, subspace_dim] float32, contiguous
    keys: Tensor,  # [num_parts, subspace_dim, context_len] float32, contiguous
) -> Tensor:
    """Every centroid's score of every key: [num_parts, num_centroids, context_len] float32."""
    num_parts, num_centroids, subspace_dim = codebooks.shape
    context_len = keys.shape[2]
    assert codebooks.is_contiguous() and keys.is_contiguous(), "parts must lie one after the other"
    scores = keys.new_empty(num_parts, num_centroids, context_len)
    num_rows = min(_CENTROIDS, triton.next_power_of_2(num_centroids))
    grid = (triton.cdiv(context_len, _TILE * _TILES), triton.cdiv(num_centroids, num_rows), num_parts)
    _score_kernel[grid](
        codebooks.double(),  # once, instead of in every program: conversions are slow
        keys,
        scores,
        context_len,
        num_centroids,
        SUBSPACE_DIM=subspace_dim,
        NUM_ROWS=num_rows,
        TILE=_TILE,
        NUM_TILES=_TILES,
        num_warps=8,
    )
    return scores


@triton.jit
def _score_kernel(
    codebooks,
    keys,
    scores,
    context_len,
    num_centroids,
    SUBSPACE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    part = tl.program_id(2).to(tl.int64)
    centroids = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    has_centroid = centroids < num_centroids
    codebooks += part * num_centroids * SUBSPACE_DIM
    keys += part * SUBSPACE_DIM * context_len
    rows = (part * num_centroids + centroids) * context_len
    for step in range(NUM_TILES):
        columns = (tl.program_id(0) * NUM_TILES + step) * TILE + tl.arange(0, TILE)
        has_key = columns < context_len
        sums = tl.zeros((NUM_ROWS, TILE), tl.float64)
        of_dim = keys
        for dim in range(SUBSPACE_DIM):
            weight = tl.load(codebooks + centroids * SUBSPACE_DIM + dim, has_centroid, 0.0)
            key = tl.load(of_dim + columns, has_key, 0.0).to(tl.float64)
            sums += weight[:, None] * key[None, :]
            of_dim += context_len  # a step at a time: dim * context_len may be more than 32 bits hold
        inside = has_centroid[:, None] & has_key[None, :]
        tl.store(scores + rows[:, None] + columns[None, :], sums.to(tl.float32), inside)
