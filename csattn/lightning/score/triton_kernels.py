"""Scores on a GPU, in Triton: heads are summed up in registers, tiles that no query may see are skipped.

A program has `columns` pairs of a query and a head (four queries of 64 heads), whose vectors stay in shared memory, and
goes through `tiles` tiles of `keys` keys: a matrix product each, ReLU, weights, the sum over a query's heads, a store.
A score's bits depend on the `TileShape`, not on where its key lies in a tile, nor on the keys and queries beside it,
nor on which of the two kernels asks: one writes all scores of some keys, the other lists contenders among the rest.
"""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csattn.lightning.operands.indexer import Operands
from csattn.lightning.operands.quantise import FP8

PROGRAMS_PER_SM = 2
NO_BAR = torch.iinfo(torch.int32).max  # an index of a bar that all keys reach


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a score kernel is cut. `python -m bench.lightning tune` measures others.

    The defaults leave room for PROGRAMS_PER_SM on Hopper: one weighs and sums while the other multiplies.
    """

    columns: int = 256  # pairs of a query and a head of a program
    keys: int = 64  # of a tile
    tiles: int = 64  # of a program, one after the other
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = 128  # of a thread


TILE_SHAPES = {
    FP8: TileShape(),
    torch.bfloat16: TileShape(),
    torch.float16: TileShape(),
    torch.float32: TileShape(columns=64, keys=32, num_stages=1, max_registers=None),
}


def score_tile(
    operands: Operands,
    keys: range,  # of which the scores are wanted; its step is 1, or it begins at 0
    legal_len: Tensor,  # [num_queries] int32; tiles of keys beyond are not computed
    out: Tensor,  # [num_queries, width] float32, written; width: len(keys) rounded up to whole tiles, at least
    shape: TileShape | None = None,
) -> None:
    """Score some keys, on torch's current stream. Definition: `reference.score_keys`, but for the order of summation.

    Columns beyond a query's legal keys hold anything. Of every step-th key only those are scored whose blocks of
    shape.keys * step are whole for one of a program's queries: the rest is left to `list_contenders`.
    """
    shape = TILE_SHAPES[operands.q.dtype] if shape is None else shape
    num_queries = len(operands.q)
    width = -(-len(keys) // shape.keys) if keys.step == 1 else len(keys) // shape.keys
    assert out.shape[0] == num_queries and out.stride(1) == 1, f"out has shape {tuple(out.shape)}"
    assert out.shape[1] >= width * shape.keys, f"{out.shape[1]} columns for {len(keys)} keys"
    if not num_queries or not width:
        return
    constants = _constants(operands, shape)
    # query tiles first: programs that run at the same time read the same keys
    grid = (triton.cdiv(num_queries, constants["QUERIES"]), triton.cdiv(width, shape.tiles))
    sizes = num_queries, keys.start, keys.stop, keys.step, out.stride(0)
    _score_kernel[grid](*_arrays(operands), legal_len, out, *sizes, TILES=shape.tiles, **constants)


def list_contenders(
    operands: Operands,
    legal_len: Tensor,  # [num_queries] int32
    step: int,
    bar_scores: Tensor,  # [num_queries] float32
    bar_indices: Tensor,  # [num_queries] int32
    lists: Tensor,  # [num_queries, capacity] int64, written
    counts: Tensor,  # [num_queries] int32, read and written
    shape: TileShape | None = None,
) -> None:
    """Score what `score_tile` with that step has not, and list what reaches its query's bar, by `topk.reference`.

    An entry is a score's bits above an index. What comes when a list is full is counted and not written.
    """
    shape = TILE_SHAPES[operands.q.dtype] if shape is None else shape
    num_queries, capacity = lists.shape
    assert num_queries == len(operands.q), f"lists have shape {tuple(lists.shape)}"
    constants = _constants(operands, shape)
    grid = (triton.cdiv(num_queries, constants["QUERIES"]),)
    arrays = *_arrays(operands), legal_len, bar_scores, bar_indices, lists, counts
    _list_kernel[grid](*arrays, num_queries, len(operands.k), capacity, step, NO_BAR=NO_BAR, **constants)


def queries_of_program(num_heads: int, shape: TileShape) -> int:
    """Queries that a program has all heads of."""
    return max(1, shape.columns // int(triton.next_power_of_2(num_heads)))


def _arrays(operands: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = operands.weights if operands.key_scale is None else operands.key_scale
    return operands.q, operands.k, operands.weights, scale


def _constants(operands: Operands, shape: TileShape) -> dict[str, Any]:
    _, num_heads, head_dim = operands.q.shape
    heads = triton.next_power_of_2(num_heads)
    return {
        "NUM_HEADS": num_heads,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "WIDTH": max(32, triton.next_power_of_2(head_dim)),  # a matrix product of FP8 is at least that deep
        "QUERIES": queries_of_program(num_heads, shape),
        "KEYS": shape.keys,
        "HAS_SCALE": operands.key_scale is not None,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        "maxnreg": shape.max_registers,
    }


@triton.jit(do_not_specialize=["num_queries", "first_key", "end_key", "step", "out_stride"])
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
    step,
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
    longest = tl.minimum(tl.max(lens, 0), end_key)
    num_scores = longest - first_key
    if step > 1:
        num_scores = longest // (KEYS * step) * KEYS
    start = tl.program_id(1) * (TILES * KEYS)
    end = tl.minimum(num_scores, start + TILES * KEYS)
    if start >= end:
        return
    vectors, weight = _load_queries(q, weights, query, num_queries, NUM_HEADS, HEADS, HEAD_DIM, WIDTH, QUERIES)
    out_rows = out + rows.to(tl.int64)[None, :] * out_stride
    for first in range(start, end, KEYS):
        places = first + tl.arange(0, KEYS)
        # beyond the last key, it once more: the columns are there, and hold anything
        held = tl.minimum(first_key + places * step, end_key - 1)
        scores = _score(k, key_scale, held, vectors, weight, HEADS, HEAD_DIM, WIDTH, QUERIES, KEYS, HAS_SCALE)
        tl.store(out_rows + places[:, None], scores, (rows < num_queries)[None, :])


@triton.jit(do_not_specialize=["num_queries", "num_keys", "capacity", "step"])
def _list_kernel(
    q,
    k,
    weights,
    key_scale,
    legal_len,
    bar_scores,
    bar_indices,
    lists,
    counts,
    num_queries,
    num_keys,
    capacity,
    step,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    NO_BAR: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    rows = query + tl.arange(0, QUERIES)
    lens = tl.load(legal_len + rows, rows < num_queries, 0)
    bar_score = tl.load(bar_scores + rows, rows < num_queries, 0.0)[None, :]
    bar_index = tl.load(bar_indices + rows, rows < num_queries, 0)[None, :]
    longest = tl.max(lens, 0)
    # of whole blocks all but every step-th key, then what is left of the sequence
    num_blocks = tl.where(step > 1, longest // (KEYS * step), 0)
    num_apart = num_blocks * (step - 1)
    num_tiles = num_apart + tl.cdiv(longest - num_blocks * KEYS * step, KEYS)
    vectors, weight = _load_queries(q, weights, query, num_queries, NUM_HEADS, HEADS, HEAD_DIM, WIDTH, QUERIES)
    lane = tl.arange(0, KEYS)
    first_entries = lists + rows.to(tl.int64)[None, :] * capacity + tl.zeros((KEYS, QUERIES), tl.int64)
    of_query = counts + rows[None, :] + tl.zeros((KEYS, QUERIES), tl.int32)
    others = tl.maximum(step - 1, 1)
    for number in range(0, num_tiles):
        apart = number < num_apart
        in_block = number // others * KEYS * step + 1 + number % others
        beyond = num_blocks * KEYS * step + (number - num_apart) * KEYS
        index = (tl.where(apart, in_block, beyond) + lane * tl.where(apart, step, 1))[:, None]
        held = tl.minimum(tl.reshape(index, (KEYS,)), num_keys - 1)
        scores = _score(k, key_scale, held, vectors, weight, HEADS, HEAD_DIM, WIDTH, QUERIES, KEYS, HAS_SCALE)
        # NaN reaches no bar; where there is none, all are kept
        reaches = (scores > bar_score) | ((scores == bar_score) & (index <= bar_index)) | (bar_index == NO_BAR)
        kept = reaches & (index < lens[None, :])
        place = tl.atomic_add(of_query, 1, kept, sem="relaxed")
        entry = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | index
        tl.store(first_entries + place, entry, kept & (place < capacity))


@triton.jit
def _load_queries(
    q,
    weights,
    query,
    num_queries,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Vectors [WIDTH, QUERIES * HEADS] and weights [QUERIES * HEADS]; 0 where there is no query, head or channel."""
    columns = tl.arange(0, QUERIES * HEADS)
    row, head, dims = query + columns // HEADS, columns % HEADS, tl.arange(0, WIDTH)
    there = (row < num_queries) & (head < NUM_HEADS)
    pairs = row.to(tl.int64) * NUM_HEADS + head
    vectors = tl.load(q + pairs[:, None] * HEAD_DIM + dims[None, :], there[:, None] & (dims[None, :] < HEAD_DIM), 0.0)
    # turned before the loop: then they go to shared memory once, not for every tile
    return tl.trans(vectors), tl.load(weights + pairs, there, 0.0)


@triton.jit
def _score(
    k,
    key_scale,
    keys,
    vectors,
    weight,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Scores [KEYS, QUERIES] of some keys, which must exist."""
    dims = tl.arange(0, WIDTH)
    tile = k + keys.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tile = tl.load(tile) if HEAD_DIM == WIDTH else tl.load(tile, dims[None, :] < HEAD_DIM, 0.0)
    products = tl.dot(tile, vectors, input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    scores = tl.sum(tl.reshape(products * weight[None, :], (KEYS, QUERIES, HEADS)), 2)
    if HAS_SCALE:
        scores *= tl.load(key_scale + keys)[:, None]
    return scores
