"""Ways to index a context and the rows that a request adds to it.

An index of any making is a list of parts that hold different rows. What a part says of its rows are scores in its own
terms; adding the query's product with the mean that it takes off keys makes them comparable between parts.

* `streamed`: what is. The rows join the context's table, with its centroids, basis, mean and scales.
* `rescaled`: likewise, but the scales are made anew over all rows: what clipping costs.
* `rebuilt`: everything made anew, from the queries and keys of context and tail: the best that can be had.
* `second index`: the tail has an index of its own, built from its own queries and keys. The context keeps its own.
* `turned`: the tail is cut into segments. RoPE makes scores depend on distances alone, so a segment's keys may be
  turned back to where the context began, and queries by as much when they look there: the context's own centroids,
  basis, mean and scales fit them. Nothing is built.
* `foreseen`: `turned`, and the context's centroids were placed for its queries as they are and as they will be turned
  when the tail has grown.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.config import IndexConfig
from csattn.index import LayerIndex
from csattn.search.reference import score_keys
from csattn.table.rows import RowTable
from csattn.table.tail import Tail, make_tail
from index_build.layer import build_layer_index
from index_build.tables import make_row_table

Floats = NDArray[np.float32]
# where keys are turned back to: segments as long as this share of the context
SEGMENT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's recorded queries and keys, of all tokens."""

    q: Floats  # [num_q_heads, num_tokens, head_dim]
    k: Floats  # [num_kv_heads, num_tokens, head_dim]
    frequencies: Floats  # [head_dim // 2]

    @property
    def softmax_scale(self) -> float:
        return float(self.k.shape[2]) ** -0.5

    def index_of(self, rows: slice, config: IndexConfig, threads: Executor) -> LayerIndex:
        return _build(self.q[:, rows], self.k[:, rows], config, threads)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows, in the order of the sequence."""

    index: LayerIndex
    tail: Tail | None
    turn: Callable[[Floats], Floats] = lambda rows: rows  # of a query, before it is matched

    @property
    def num_rows(self) -> int:
        return self.index.context_len + (self.tail.num_rows if self.tail is not None else 0)

    def scores(self, q: Floats, head: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """What q [head_dim] makes of the rows [num_rows], and which of them it has a score for."""
        turned = self.turn(q)
        scores, scored = score_keys(turned, self.index, self.tail, head)
        return scores + float(turned @ self.index.key_mean[head]), scored


def row_makings(
    layer: Layer, context_len: int, tail_len: int, config: IndexConfig, threads: Executor
) -> tuple[dict[str, list[Part]], dict[str, float]]:
    """Every making of an index of rows, and the seconds that those took which cluster."""
    index = layer.index_of(slice(0, context_len), config, threads)
    num_keys = context_len + tail_len
    seconds: dict[str, float] = {}
    makings = {"streamed": [Part(index, tail_of(index, layer.k[:, context_len:num_keys]))]}
    if not tail_len:
        return makings, seconds
    makings["rescaled"] = [Part(_rescaled(index, layer.k[:, :num_keys], threads), None)]
    for name, rows in (("rebuilt", slice(0, num_keys)), ("second index", slice(context_len, num_keys))):
        started = time.perf_counter()
        built = Part(layer.index_of(rows, config, threads), None)
        seconds[name] = time.perf_counter() - started
        makings[name] = [built] if name == "rebuilt" else [Part(index, None), built]
    makings["turned"] = _turned(layer, index, num_keys)
    makings["foreseen"] = _turned(layer, _foreseeing(layer, context_len, tail_len, config, threads), num_keys)
    return makings, seconds


def list_makings(
    layer: Layer, context_len: int, tail_len: int, config: IndexConfig, threads: Executor
) -> tuple[dict[str, list[Part]], dict[str, float]]:
    """Likewise for lists, whose scores of different parts do not compare: unlisted keys have none."""
    index = layer.index_of(slice(0, context_len), config, threads)
    makings = {"streamed": [Part(index, tail_of(index, layer.k[:, context_len : context_len + tail_len]))]}
    if tail_len:
        makings["rebuilt"] = [Part(layer.index_of(slice(0, context_len + tail_len), config, threads), None)]
    return makings, {}


def tail_of(index: LayerIndex, keys: Floats) -> Tail:
    """The streaming update of these keys [num_kv_heads, num_rows, head_dim]."""
    tail = make_tail(index)
    for k in keys.transpose(1, 0, 2):
        tail.append(k)
    return tail


def turned_by(rows: Floats, positions: NDArray[np.int64] | int, frequencies: Floats) -> Floats:
    """Rows [..., num_rows, head_dim] after RoPE, as they would be so many positions later."""
    angles = np.multiply.outer(np.asarray(positions, np.float64), frequencies.astype(np.float64))
    first, second = np.split(rows, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(np.float32)


def _turned(layer: Layer, index: LayerIndex, num_keys: int) -> list[Part]:
    assert isinstance(index.table, RowTable)
    context_len, parts = index.context_len, [Part(index, None)]
    empty = replace(index, table=RowTable(index.table.codes[..., :0].copy(), index.table.scales, 0))
    segment_len = max(1, int(SEGMENT_SHARE * context_len))
    for start in range(context_len, num_keys, segment_len):
        keys = layer.k[:, start : min(start + segment_len, num_keys)]

        def turn(rows: Floats, by: int = -start) -> Floats:
            return turned_by(rows, by, layer.frequencies)

        parts.append(Part(empty, tail_of(empty, turn(keys)), turn))
    return parts


def _foreseeing(layer: Layer, context_len: int, tail_len: int, config: IndexConfig, threads: Executor) -> LayerIndex:
    """An index of the context for queries that come up to tail_len positions after it: each one turned once."""
    rng = np.random.default_rng(0)
    q = layer.q[:, :context_len]
    later = turned_by(q, rng.integers(0, tail_len, context_len), layer.frequencies)
    return _build(np.concatenate([q, later], axis=1), layer.k[:, :context_len], config, threads)


def _rescaled(index: LayerIndex, keys: Floats, threads: Executor) -> LayerIndex:
    assert isinstance(index.table, RowTable)
    centred = torch.from_numpy(np.einsum("hnd,hde->hen", keys - index.key_mean[:, None], index.key_basis))
    codebooks = torch.from_numpy(np.array(index.codebooks))
    codes, scales = make_row_table(codebooks, centred.contiguous(), index.table.score_bits, threads)
    return replace(index, table=RowTable(codes.numpy(), scales.numpy(), keys.shape[1]))


def _build(q: Floats, k: Floats, config: IndexConfig, threads: Executor) -> LayerIndex:
    kv = torch.from_numpy(k)[:, :, None].expand(-1, -1, 2, -1)
    return build_layer_index(torch.from_numpy(q), kv, config, threads, None)
