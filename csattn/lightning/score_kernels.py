"""Scores on a GPU, in Triton: heads are summed up in registers, tiles that no query may see are skipped.

A program has `columns` pairs of a query and a head (four queries of 64 heads), whose vectors stay in shared memory, and
goes through `tiles` tiles of `keys` keys: a matrix product each, ReLU, weights, the sum over a query's heads, a store.
A score's bits depend on the `TileShape`, not on where its key lies in a tile, nor on the keys and queries beside it.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.quantise import FP8
from csattn.lightning.score import Operands


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a score kernel is cut. `python -m bench.lightning tune` measures others."""

    columns: int = 256  # pairs of a query and a head of a program
    keys: int = 64  # of a tile
    tiles: int = 64  # of a program, one after the other
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = None  # of a thread


TILE_SHAPES = {torch.float32: TileShape(columns=128, num_stages=2), FP8: TileShape(), torch.bfloat16: TileShape()}
TILE_SHAPES[torch.float16] = TILE_SHAPES[torch.bfloat16]


def score_tile(
    operands: Operands,
    keys: range,  # of which the scores are wanted
    legal_len: Tensor,  # [num_queries] int32; tiles of keys beyond are not computed
    out: Tensor,  # [num_queries, width] float32, written; width: len(keys) rounded up to whole tiles, at least
    shape: TileShape | None = None,
) -> None:
    """Score some keys, on torch's current stream. Definition: `score.score_keys`, but for the order of summation.

    Columns beyond a query's legal keys hold anything.
    """
    shape = TILE_SHAPES[operands.q.dtype] if shape is None else shape
    num_queries, num_heads, head_dim = operands.q.shape
    heads = triton.next_power_of_2(num_heads)
    queries = max(1, shape.columns // heads)
    assert out.shape[0] == num_queries and out.stride(1) == 1, f"out has shape {tuple(out.shape)}"
    assert out.shape[1] >= -(-len(keys) // shape.keys) * shape.keys, f"{out.shape[1]} columns for {len(keys)} keys"
    if not num_queries or not len(keys):
        return
    # query tiles first: programs that run at the same time read the same keys
    grid = (triton.cdiv(num_queries, queries), triton.cdiv(len(keys), shape.keys * shape.tiles))
    _score_kernel[grid](
        operands.q,
        operands.k,
        operands.weights,
        operands.weights if operands.key_scale is None else operands.key_scale,
        legal_len,
        out,
        num_queries,
        keys.start,
        keys.stop,
        out.stride(0),
        NUM_HEADS=num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=max(32, triton.next_power_of_2(head_dim)),  # a matrix product of FP8 is at least that deep
        QUERIES=queries,
        KEYS=shape.keys,
        TILES=shape.tiles,
        HAS_SCALE=operands.key_scale is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
    )


@triton.jit(do_not_specialize=["num_queries", "first_key", "end_key", "out_stride"])
def _score_kernel(
    q,
    k,
    weights,
    key_scale,
    legal_len,
    out,
    num_queries,
    first_key,
    end_key,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    # the last queries see the most keys: they begin
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    rows = query + tl.arange(0, QUERIES)
    lens = tl.load(legal_len + rows, rows < num_queries, 0)
    start = first_key + tl.program_id(1) * (TILES * KEYS)
    end = tl.minimum(tl.minimum(tl.max(lens, 0), end_key), start + TILES * KEYS)
    if start >= end:
        return
    columns = tl.arange(0, QUERIES * HEADS)
    of_row, head, dims = query + columns // HEADS, columns % HEADS, tl.arange(0, WIDTH)
    there = (of_row < num_queries) & (head < NUM_HEADS)
    pairs = of_row.to(tl.int64) * NUM_HEADS + head
    vectors = tl.load(q + pairs[:, None] * HEAD_DIM + dims[None, :], there[:, None] & (dims[None, :] < HEAD_DIM), 0.0)
    vectors = tl.trans(vectors)
    weight = tl.load(weights + pairs, there, 0.0)
    out_rows = out + rows.to(tl.int64)[None, :] * out_stride
    for first in range(start, end, KEYS):
        positions = first + tl.arange(0, KEYS)
        # beyond the last key, it once more: the columns are there, and hold anything
        held = tl.minimum(positions, end_key - 1)
        tile = k + held.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        tile = tl.load(tile) if HEAD_DIM == WIDTH else tl.load(tile, dims[None, :] < HEAD_DIM, 0.0)
        products = tl.dot(tile, vectors, input_precision="ieee")
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.sum(tl.reshape(products * weight[None, :], (KEYS, QUERIES, HEADS)), 2)
        if HAS_SCALE:
            scores *= tl.load(key_scale + held)[:, None]
        tl.store(out_rows + (positions - first_key)[:, None], scores, (rows < num_queries)[None, :])
