"""Scores and codes of all subspaces on a GPU, in Triton. Definition: `reference.py`.

Keys are read twice, once for each row's largest score and once for its codes; scores never leave the registers.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csattn.table.rows import KEYS_PER_BLOCK, row_bytes

_CENTROIDS = 64  # of a program; fewer are padded
_TILE = 64  # keys, or bytes of their codes
_TILES = 8  # in a program, one after the other
_HALF = tl.constexpr(KEYS_PER_BLOCK // 2)
# 1.5 * 2^23: adding it leaves no fraction, and float32 rounds ties to even
_ROUNDING = tl.constexpr(12582912.0)


def score_keys(
    codebooks: Tensor,  # [num_parts, num_centroids, subspace_dim] float32, contiguous
    keys: Tensor,  # [num_parts, subspace_dim, context_len] float32, contiguous
) -> Tensor:
    """Every centroid's score of every key: [num_parts, num_centroids, context_len] float32."""
    scores = keys.new_empty(*codebooks.shape[:2], keys.shape[2])
    _launch(_score_kernel, codebooks, keys, keys.shape[2], (scores,))
    return scores


def largest_scores(codebooks: Tensor, keys: Tensor) -> Tensor:
    """The largest magnitude among each centroid's scores: [num_parts, num_centroids] float32."""
    bits = torch.zeros(codebooks.shape[:2], dtype=torch.int32, device=keys.device)
    _launch(_largest_kernel, codebooks, keys, keys.shape[2], (bits,))
    return bits.view(torch.float32)


def quantise_keys(
    codebooks: Tensor,
    keys: Tensor,
    scales: Tensor,  # [num_parts, num_centroids] float32
    score_bits: int,
) -> Tensor:
    """Codes of all keys as `csattn.table.rows` lays them out: [num_parts, num_centroids, row_bytes]."""
    width = row_bytes(keys.shape[2], score_bits)
    codes = torch.empty(
        *codebooks.shape[:2], width, dtype=torch.uint8 if score_bits == 4 else torch.int8, device=keys.device
    )
    _launch(_quantise_kernel, codebooks, keys, width, (scales, codes, width), SCORE_BITS=score_bits)
    return codes


def _launch(
    kernel: Any, codebooks: Tensor, keys: Tensor, num_columns: int, arguments: tuple[Any, ...], **constants: int
) -> None:
    """One program for some centroids of a part and `_TILES` tiles of the output's columns."""
    num_parts, num_centroids, subspace_dim = codebooks.shape
    assert codebooks.is_contiguous() and keys.is_contiguous(), "parts must lie one after the other"
    num_rows = min(_CENTROIDS, triton.next_power_of_2(num_centroids))
    grid = (triton.cdiv(num_columns, _TILE * _TILES), triton.cdiv(num_centroids, num_rows), num_parts)
    kernel[grid](
        codebooks.double(),  # once, instead of in every program: conversions are slow
        keys,
        *arguments,
        keys.shape[2],
        num_centroids,
        SUBSPACE_DIM=subspace_dim,
        NUM_ROWS=num_rows,
        TILE=_TILE,
        NUM_TILES=_TILES,
        num_warps=8,
        **constants,
    )


@triton.jit
def _tile_scores(
    codebook,
    keys,
    centroids,
    columns,
    context_len,
    num_centroids,
    SUBSPACE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """float32 scores [NUM_ROWS, TILE]; 0 where there is no centroid or no key."""
    sums = tl.zeros((NUM_ROWS, TILE), tl.float64)
    has_centroid = centroids < num_centroids
    has_key = columns < context_len
    for dim in range(SUBSPACE_DIM):
        weight = tl.load(codebook + centroids * SUBSPACE_DIM + dim, has_centroid, 0.0)
        key = tl.load(keys + columns, has_key, 0.0).to(tl.float64)
        sums += weight[:, None] * key[None, :]
        keys += context_len
    return sums.to(tl.float32)


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
    codebooks += part * num_centroids * SUBSPACE_DIM
    keys += part * SUBSPACE_DIM * context_len
    rows = (part * num_centroids + centroids) * context_len
    for step in range(NUM_TILES):
        columns = (tl.program_id(0) * NUM_TILES + step) * TILE + tl.arange(0, TILE)
        found = _tile_scores(
            codebooks, keys, centroids, columns, context_len, num_centroids, SUBSPACE_DIM, NUM_ROWS, TILE
        )
        inside = (centroids < num_centroids)[:, None] & (columns < context_len)[None, :]
        tl.store(scores + rows[:, None] + columns[None, :], found, inside)


@triton.jit
def _largest_kernel(
    codebooks,
    keys,
    largest_bits,
    context_len,
    num_centroids,
    SUBSPACE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    part = tl.program_id(2).to(tl.int64)
    centroids = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    codebooks += part * num_centroids * SUBSPACE_DIM
    keys += part * SUBSPACE_DIM * context_len
    largest = tl.zeros((NUM_ROWS,), tl.float32)
    for step in range(NUM_TILES):
        columns = (tl.program_id(0) * NUM_TILES + step) * TILE + tl.arange(0, TILE)
        found = _tile_scores(
            codebooks, keys, centroids, columns, context_len, num_centroids, SUBSPACE_DIM, NUM_ROWS, TILE
        )
        largest = tl.maximum(largest, tl.max(tl.abs(found), axis=1))
    # bits of floats that are not negative are ordered as they are, and a maximum does not depend on the order
    bits = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(largest_bits + part * num_centroids + centroids, bits, centroids < num_centroids)


@triton.jit
def _tile_codes(scores, steps, LARGEST_CODE: tl.constexpr):
    """The int32 code nearest to each score, ties to even."""
    codes = tl.minimum(tl.maximum(tl.div_rn(scores, steps[:, None]), -LARGEST_CODE), LARGEST_CODE)
    return ((codes + _ROUNDING) - _ROUNDING).to(tl.int32)


@triton.jit
def _quantise_kernel(
    codebooks,
    keys,
    scales,
    codes,
    width,
    context_len,
    num_centroids,
    SUBSPACE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    SCORE_BITS: tl.constexpr,
):
    part = tl.program_id(2).to(tl.int64)
    centroids = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    codebooks += part * num_centroids * SUBSPACE_DIM
    keys += part * SUBSPACE_DIM * context_len
    rows = part * num_centroids + centroids
    scale = tl.load(scales + rows, centroids < num_centroids, 0.0)
    steps = tl.where(scale > 0, scale, 1.0)
    for step in range(NUM_TILES):
        columns = (tl.program_id(0) * NUM_TILES + step) * TILE + tl.arange(0, TILE)  # bytes of a row
        first_keys = columns
        if SCORE_BITS == 4:
            first_keys = columns // _HALF * (2 * _HALF) + columns % _HALF
        found = _tile_scores(
            codebooks, keys, centroids, first_keys, context_len, num_centroids, SUBSPACE_DIM, NUM_ROWS, TILE
        )
        if SCORE_BITS == 8:
            stored = _tile_codes(found, steps, 127.0).to(tl.int8)
        else:
            low = _tile_codes(found, steps, 7.0) + 8
            found = _tile_scores(
                codebooks, keys, centroids, first_keys + _HALF, context_len, num_centroids, SUBSPACE_DIM, NUM_ROWS, TILE
            )
            stored = (low | ((_tile_codes(found, steps, 7.0) + 8) << 4)).to(tl.uint8)
        inside = (centroids < num_centroids)[:, None] & (columns < width)[None, :]
        tl.store(codes + rows[:, None] * width + columns[None, :], stored, inside)
