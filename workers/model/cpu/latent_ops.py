"""Records the operations of layers of latents (MLA) on a tape, and their stages, which work on each row by itself."""

from typing import Any

import numpy as np
from torch import Tensor

from csattn.batch import StepRows
from csattn.cpu.addresses import KindStage, array_at
from csattn.cpu.arguments import bytes_of, floats_of, number_at, word_of, words_at
from csattn.cpu.floats import store_float
from csattn.cpu.simd import LANES
from csattn.models.latent_spec import LatentSpec
from csattn.models.query import Rotation
from csattn.models.weights import LatentWeights
from workers.model.cpu.linear import TILE, add_up_rows, products
from workers.model.cpu.row_stages import ROTATION, inverse_rms, rotate_pairs
from workers.model.cpu.stage_recorder import StageRecorder, rotation_arguments
from workers.model.ops import LatentBuffers

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise.
APPEND = (
    "inputs",  # [num_rows, in_width]
    "in_width",
    "q_rank",  # width of the queries' latents, which come first in inputs; 0: there are none
    "key_at",  # where the row's key begins in inputs: the latent, then the part that RoPE rotates
    "kv_rank",
    "index_at",  # where its index key begins
    "index_dim",  # 0: there is no index key
    "index_interleaved",
    "q_norm",  # [q_rank]
    "kv_norm",  # [kv_rank]
    "index_norm",  # [2, index_dim]: weights and biases
    *ROTATION,
    "tails",  # of the layer, [num_tails, tail_capacity, width], of the model's dtype
    "tail_capacity",
    "width",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
    "q_latents",  # [num_rows, q_rank], written
)
QUERIES = (
    "inputs",  # [num_rows, in_width]: the weights of the index heads come last
    "in_width",
    "projected",  # [num_rows, projected_width]: all heads' queries, then those of the index heads
    "projected_width",
    "num_heads",
    "nope_dim",
    "kv_rank",
    "up_k",  # of the model's dtype; heads of [nope_dim, kv_rank], head_stride apart
    "head_stride",  # elements
    *ROTATION,
    "num_index_heads",
    "index_dim",
    "index_interleaved",
    "weight_scale",  # address of a float64
    "q",  # [num_rows, num_heads, kv_rank + 2 * half], written
    "index_q",  # [num_rows, num_index_heads, index_dim], written
    "index_weights",  # [num_rows, num_index_heads], written
)
VALUES = (
    "attended",  # [num_rows, num_heads, kv_rank]
    "num_heads",
    "kv_rank",
    "up_v",  # of the model's dtype; heads of [v_dim, kv_rank], head_stride apart
    "head_stride",  # elements
    "v_dim",
    "values",  # [num_rows, num_heads, v_dim], written
)
_EPS = np.float32(1e-6)  # `csattn.models.latent.EPS`
_append_at, _queries_at, _values_at = words_at(APPEND), words_at(QUERIES), words_at(VALUES)


class TapeLatentOps(StageRecorder):
    """The part of `TapeOps` for layers of latents."""

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,
        buffers: LatentBuffers,
    ) -> None:
        _, _, tail_capacity, _, head_dim = tail.shape
        indexer, (key_at, key_width, index_dim, _) = spec.indexer, spec.in_widths
        self._record(
            KindStage(append_stage, self._kind),
            APPEND,
            writes=[tail, buffers.q_latents],
            inputs=buffers.inputs,
            in_width=buffers.inputs.shape[1],
            q_rank=spec.q_rank or 0,
            key_at=key_at,
            kv_rank=spec.kv_rank,
            index_at=key_at + key_width,
            index_dim=index_dim,
            index_interleaved=indexer is not None and indexer.interleaved,
            q_norm=weights.q_norm,
            kv_norm=weights.kv_norm,
            index_norm=weights.index_norm,
            tails=tail,
            tail_capacity=tail_capacity,
            width=2 * head_dim,
            tail_ids=rows.tail_ids,
            tail_lens=rows.tail_lens,
            q_latents=buffers.q_latents,
            **rotation_arguments(rotation),
        )

    def project_latent_queries(
        self, weights: LatentWeights, spec: LatentSpec, rotation: Rotation, buffers: LatentBuffers
    ) -> None:
        indexer, queries = spec.indexer, buffers.queries
        num_index_heads, index_dim = spec.num_index_heads, spec.index_dim
        index = [of for of in (queries.index_q, queries.index_weights) if of is not None]
        assert weights.up_k.stride()[1:] == (spec.kv_rank, 1)
        self._record(
            KindStage(queries_stage, self._kind),
            QUERIES,
            writes=[queries.q, *index],
            per_row=spec.num_heads + num_index_heads,
            inputs=buffers.inputs,
            in_width=buffers.inputs.shape[1],
            projected=buffers.projected,
            projected_width=buffers.projected.shape[1],
            num_heads=spec.num_heads,
            nope_dim=spec.nope_dim,
            kv_rank=spec.kv_rank,
            up_k=weights.up_k.data_ptr(),
            head_stride=weights.up_k.stride(0),
            num_index_heads=num_index_heads,
            index_dim=index_dim,
            index_interleaved=indexer is not None and indexer.interleaved,
            weight_scale=self._number((num_index_heads * index_dim) ** -0.5 if indexer is not None else 0.0),
            q=queries.q,
            index_q=queries.index_q,
            index_weights=queries.index_weights,
            **rotation_arguments(rotation),
        )

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, buffers: LatentBuffers) -> None:
        assert weights.up_v.stride()[1:] == (spec.kv_rank, 1)
        self._record(
            KindStage(values_stage, self._kind),
            VALUES,
            writes=[buffers.values],
            per_row=spec.num_heads,
            attended=buffers.attended,
            num_heads=spec.num_heads,
            kv_rank=spec.kv_rank,
            up_v=weights.up_v.data_ptr(),
            head_stride=weights.up_v.stride(0),
            v_dim=spec.v_dim,
            values=buffers.values,
        )


def append_stage(arguments: int, row: int, thread: int, like: Any) -> int:
    """Norm a row's latents, and append its latent, rotated key and index key to its tail.

    A piece is a row. like: an element of the model's weights, as in the other stages.
    """
    args, itemsize = _append_at(arguments), bytes_of(like)
    q_rank, key_at, kv_rank = args.q_rank, args.key_at, args.kv_rank
    index_at, index_dim = args.index_at, args.index_dim
    inputs = floats_of(args.inputs, row, args.in_width)
    if q_rank > 0:
        norm, out = array_at(args.q_norm, q_rank, np.float32(0)), floats_of(args.q_latents, row, q_rank)
        scale = inverse_rms(inputs, 0, q_rank, _EPS)
        for i in range(q_rank):
            out[i] = inputs[i] * scale * norm[i]
    half = args.half
    cos, sin = floats_of(args.cos, row, half), floats_of(args.sin, row, half)
    made = np.zeros(args.width, np.float32)
    norm, scale = array_at(args.kv_norm, kv_rank, np.float32(0)), inverse_rms(inputs, key_at, kv_rank, _EPS)
    for i in range(kv_rank):
        made[i] = inputs[key_at + i] * scale * norm[i]
    rotate_pairs(inputs, key_at + kv_rank, 2 * half, cos, sin, args.interleaved != 0, made, kv_rank)
    if index_dim > 0:
        normed, mean = np.empty(index_dim, np.float32), 0.0
        norm = array_at(args.index_norm, 2 * index_dim, np.float32(0))
        for i in range(index_dim):
            mean += inputs[index_at + i]
        for i in range(index_dim):
            normed[i] = inputs[index_at + i] - mean / index_dim
        scale = inverse_rms(normed, 0, index_dim, _EPS)
        for i in range(index_dim):
            normed[i] = normed[i] * scale * norm[i] + norm[index_dim + i]
        rotate_pairs(normed, 0, index_dim, cos, sin, args.index_interleaved != 0, made, kv_rank + 2 * half)
    tail_id = word_of(args.tail_ids, row)
    place = word_of(args.tail_lens, row) - 1
    tail_row = array_at(args.tails + (tail_id * args.tail_capacity + place) * args.width * itemsize, args.width, like)
    for i in range(args.width):
        store_float(tail_row, i, made[i])
    return 0


def queries_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Compute the query of a head in latent space, or the query and weight of an index head.

    A piece is a head of a row, index heads last.
    """
    args, itemsize = _queries_at(arguments), bytes_of(like)
    num_heads, nope_dim, kv_rank, half = args.num_heads, args.nope_dim, args.kv_rank, args.half
    num_index_heads, index_dim = args.num_index_heads, args.index_dim
    row, head = piece // (num_heads + num_index_heads), piece % (num_heads + num_index_heads)
    projected = floats_of(args.projected, row, args.projected_width)
    cos, sin = floats_of(args.cos, row, half), floats_of(args.sin, row, half)
    if head >= num_heads:
        head -= num_heads
        at = num_heads * (nope_dim + 2 * half) + head * index_dim
        out = floats_of(args.index_q, row * num_index_heads + head, index_dim)
        rotate_pairs(projected, at, index_dim, cos, sin, args.index_interleaved != 0, out, 0)
        weights, scale = floats_of(args.index_weights, row, num_index_heads), number_at(args.weight_scale)
        counts = floats_of(args.inputs, row, args.in_width)
        weights[head] = counts[args.in_width - num_index_heads + head] * scale
        return 0
    at, out = head * (nope_dim + 2 * half), floats_of(args.q, row * num_heads + head, kv_rank + 2 * half)
    up = array_at(args.up_k + head * args.head_stride * itemsize, nope_dim * kv_rank, like)
    add_up_rows(projected, at, nope_dim, up, kv_rank, out)
    rotate_pairs(projected, at + nope_dim, 2 * half, cos, sin, args.interleaved != 0, out, kv_rank)
    out *= floats_of(args.q_scale, 0, row + 1)[row]
    return 0


def values_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Project a head's attended latent up to its values. A piece is a head of a row."""
    args, itemsize = _values_at(arguments), bytes_of(like)
    kv_rank, v_dim = args.kv_rank, args.v_dim
    attended, out = floats_of(args.attended, piece, kv_rank), floats_of(args.values, piece, v_dim)
    up = array_at(args.up_v + piece % args.num_heads * args.head_stride * itemsize, v_dim * kv_rank, like)
    sums = np.empty(LANES + TILE, np.float32)
    for first in range(0, v_dim, LANES):
        count = min(LANES, v_dim - first)
        products(attended, 1, up, kv_rank, first, count, kv_rank, sums)
        for i in range(count):
            out[first + i] = sums[i]
    return 0
