"""What a tail of 30 000 rows costs: time and memory of an append, time of a search, and whether its bits are right.

Keys are a recorded layer's, again and again, each copy with a little noise (see `bench.decode.widened.tile_keys`).
"""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.decode.widened import tile_keys
from bench.table_drift.makings import Layer
from bench.timing import gate, measure
from csattn.index import LayerIndex
from csattn.search import SearchPool, empty_selection, reference
from csattn.table.rows import RowTable
from csattn.table.tail import RowTail, make_tail, score_key

KEEP, SINK_LEN, WINDOW_LEN = 0.05, 4, 256


def measure_mechanism(layer: Layer, index: LayerIndex, tail_lens: list[int]) -> list[dict[str, Any]]:
    """At every length of the tail: appends since the one before, bytes, and a search of context and tail."""
    keys = long_keys(layer, index.context_len + tail_lens[-1])
    tail = make_tail(index)
    points = []
    with SearchPool(1) as pool:
        for tail_len in tail_lens:
            spent_us = append_to(tail, keys, index.context_len, tail_len)
            q = np.ascontiguousarray(layer.q[:, -1])
            top_k = round(KEEP * (index.context_len + tail_len))
            search = search_of(pool, q, index, tail, top_k, layer.softmax_scale)
            points.append(
                {
                    "tail_len": tail_len,
                    **({"append_cpu_us": _percentiles(spent_us)} if spent_us else {}),
                    "tail_bytes": tail_bytes(tail),
                    "search": measure(search),
                }
            )
            print(points[-1], flush=True)
        check_bits(layer, index, tail, keys, pool)
    return points


def long_keys(layer: Layer, num_keys: int) -> NDArray[np.float32]:
    """[num_kv_heads, num_keys, head_dim]"""
    return tile_keys(torch.from_numpy(layer.k), num_keys, torch.float32, seed=0).numpy()


def append_to(tail: Any, keys: NDArray[np.float32], context_len: int, tail_len: int) -> list[float]:
    """Append up to that length: microseconds of CPU time that each append took."""
    spent = []
    while tail.num_rows < tail_len:
        k = keys[:, context_len + tail.num_rows]
        started = time.thread_time_ns()
        tail.append(k)
        spent.append((time.thread_time_ns() - started) / 1e3)
    return spent


def search_of(
    pool: SearchPool, q: NDArray[np.float32], index: LayerIndex, tail: Any, top_k: int, softmax_scale: float
) -> Any:
    out = empty_selection(index.num_heads, top_k)

    def search() -> Any:
        pool.search(q, index, tail, top_k, SINK_LEN, WINDOW_LEN, softmax_scale, out)
        return out

    return search


def check_bits(layer: Layer, index: LayerIndex, tail: Any, keys: NDArray[np.float32], pool: SearchPool) -> None:
    """Gate: the tail's codes are those of its rows one by one, and the search is the one that was defined."""
    tail.check()
    if isinstance(tail, RowTail):
        assert isinstance(index.table, RowTable)
        largest, scales = index.table.largest_code, index.table.scales
        for row in range(tail.num_rows):
            with np.errstate(divide="ignore", invalid="ignore"):
                want = np.rint(score_key(keys[:, index.context_len + row], index) / scales).clip(-largest, largest)
            gate(
                np.array_equal(tail.codes[..., row], np.where(scales > 0, want, 0)),
                f"row {row} of the tail has other codes than built alone",
            )
    top_k = round(KEEP * (index.context_len + tail.num_rows))
    for token in (-1, -100):
        q = np.ascontiguousarray(layer.q[:, token])
        got = search_of(pool, q, index, tail, top_k, layer.softmax_scale)()
        want = empty_selection(index.num_heads, top_k)
        reference.search(q, index, tail, top_k, SINK_LEN, WINDOW_LEN, layer.softmax_scale, want)
        gate(np.array_equal(got.kv_indices, want.kv_indices), "a search of the long tail is not the one defined")


def tail_bytes(tail: Any) -> int:
    """Of the arrays that grow with the tail."""
    arrays = [tail.codes] if isinstance(tail, RowTail) else [tail.inserted_indices, tail.inserted_scores]
    return sum(array.nbytes for array in arrays)


def _percentiles(spent_us: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(spent_us, [50, 99])
    mean = float(np.mean(spent_us))
    return {
        "p50": round(float(p50), 2),
        "p99": round(float(p99), 2),
        "mean": round(mean, 2),
        "max": round(max(spent_us), 2),
    }
