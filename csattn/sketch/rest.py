"""Attention, by codes, to the rows of a context that are neither resident nor chosen."""

import math

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel, readonly
from csattn.search.match import widen
from csattn.search.rest import attend_rows
from csattn.search.sketch import describe_sketch, project_queries, quantise_queries, query_bytes, sketch_at
from csattn.sketch.index import SketchIndex


def attend_rest(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    index: SketchIndex,
    kv_indices: NDArray[np.int32],  # [num_tokens, num_kv_heads, top_k]: the chosen rows, ascending, -1 padded
    valid_len: NDArray[np.int32],  # [num_tokens, num_kv_heads]
    first: int,  # the rows [first, stop) may be chosen
    stop: int,
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attend, by codes, to the rows of [first, stop) that are not chosen: out like q and lse [num_tokens, num_q_heads].

    Where there are none, out is 0 and lse is -inf. `reference.attend_rest` is the definition.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    assert num_q_heads % index.num_heads == 0, f"{num_q_heads} query heads cannot be divided among {index.num_heads}"
    assert kv_indices.shape[:2] == valid_len.shape == (num_tokens, index.num_heads)
    assert first >= 0 and stop <= index.context_len and head_dim == index.head_dim
    assert q.dtype == np.float32 and kv_indices.dtype == np.int32, f"got {q.dtype} and {kv_indices.dtype}"
    assert (valid_len <= kv_indices.shape[2]).all(), f"{valid_len.max()} rows of {kv_indices.shape[2]} are chosen"
    group_size = num_q_heads // index.num_heads
    sketch, queries = describe_sketch(index), np.empty(query_bytes(index, group_size), np.uint8)
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    chosen = readonly(np.ascontiguousarray(kv_indices)), readonly(np.ascontiguousarray(valid_len))
    _attend(
        readonly(np.ascontiguousarray(q)), sketch.ctypes.data, *chosen, first, stop, softmax_scale, queries, out, lse
    )
    return out, lse


@exact_kernel
def _attend(
    q: NDArray[np.float32],
    sketch_address: int,
    kv_indices: NDArray[np.int32],
    valid_len: NDArray[np.int32],
    first: int,
    stop: int,
    softmax_scale: float,
    queries: NDArray[np.uint8],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:
    # passes addresses, like `csattn.attention.in_place_rest`, so that the functions below are compiled once for both
    sketch, memory = sketch_at(sketch_address), np.int64(queries.ctypes.data)
    num_tokens, num_q_heads, head_dim = q.shape
    rows, top_k = np.int64(kv_indices.ctypes.data), kv_indices.shape[2]
    group_size = num_q_heads // sketch.num_heads
    parts = np.empty((group_size, head_dim + 2), np.float32)
    parts_address, none = np.int64(parts.ctypes.data), np.empty(0, np.uint16)
    for token in range(num_tokens):
        for head in range(sketch.num_heads):
            group = q[token, head * group_size : (head + 1) * group_size].reshape(-1)
            project_queries(sketch, head, widen(group), 0, sketch.num_segments, softmax_scale, memory)
            quantise_queries(sketch, group_size, memory)
            of_head = rows + 4 * (token * sketch.num_heads + head) * top_k
            chosen = array_at(of_head, np.int64(valid_len[token, head]), np.int32(0))
            attend_rows(sketch, head, memory, group_size, first, stop, chosen, none, 0, parts_address, head_dim + 2)
            for g in range(group_size):
                row, total = head * group_size + g, parts[g, head_dim + 1]
                lse[token, row] = parts[g, head_dim] + (math.log(total) if total > 0 else 0.0)
                for i in range(head_dim):
                    out[token, row, i] = parts[g, i] / total if total > 0 else np.float32(0.0)
