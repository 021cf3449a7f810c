"""One layer's searches as a step of one layer: planned once for each kind of searches, and then run many times.

Queries are copied into memory that the workers map, and choices are copied out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offload.shared_memory import ALIGNMENT, SharedMemory, array_in
from workers.engine.cpu.pool_searcher import RowSearch
from workers.searchers.channel import memory_errors
from workers.searchers.shares import Share, shares_of
from workers.searchers.step_searches import GIVE_UP, STEP_SEARCH, StepPlan, arrays_of

LEAST_BYTES = 1 << 16
# offset in the memory of the one query flag, which is always set: queries are written before the searches are requested
READY = GIVE_UP + ALIGNMENT
BODY = READY + ALIGNMENT


@dataclass(frozen=True, slots=True)
class Piece:
    """A worker's share of one search."""

    search: int  # number of the search in the layer
    rows: slice
    q_heads: slice
    heads: slice


class LayerStep:
    """Searches of given shapes and settings, divided among workers. Flags count from 0 at each run."""

    def __init__(self, searches: Sequence[RowSearch], num_workers: int) -> None:
        self._pieces: list[Piece] = []
        self.num_bytes = BODY  # required size of the memory
        shares = [self._share(searches, worker, num_workers) for worker in range(num_workers)]
        self.plan = StepPlan(np.concatenate(shares, axis=1), shares)

    def place_in(self, memory: SharedMemory) -> None:
        """Place the arrays and flags in this memory."""
        records = self.plan.records[0]
        self._arrays = [arrays_of(memory.array, record) for record in records]
        self._flags = [array_in(memory.array, r["choice_flag_at"], (r["num_heads"],), np.int64) for r in records]

    def write(self, searches: Sequence[RowSearch]) -> None:
        """Copy the queries into the memory, and clear the choice flags."""
        for piece, (q, _), flags in zip(self._pieces, self._arrays, self._flags, strict=True):
            q[:] = searches[piece.search].q[piece.rows, piece.q_heads]
            flags[:] = 0

    def collect(self, searches: Sequence[RowSearch]) -> None:
        """Copy the choices from the memory to each search's `out`."""
        for piece, (_, chosen) in zip(self._pieces, self._arrays, strict=True):
            out = searches[piece.search].out
            out.kv_indices[piece.rows, piece.heads] = chosen.kv_indices
            out.valid_len[piece.rows, piece.heads] = chosen.valid_len
            if out.rest is not None:
                out.rest[piece.rows, piece.q_heads] = chosen.rest

    def _share(self, searches: Sequence[RowSearch], worker: int, num_workers: int) -> NDArray[np.void]:
        """Make one worker's records, [1, num_pieces], and add its pieces."""
        shares = [
            (number, share)
            for number, search in enumerate(searches)
            for share in shares_of(worker, num_workers, *search.out.valid_len.shape)
        ]
        records = np.zeros((1, len(shares)), STEP_SEARCH)
        for record, (number, share) in zip(records[0], shares, strict=True):
            self.num_bytes = _fill(record, searches[number], share, self.num_bytes)
            rows = slice(share.first_row, share.first_row + share.num_rows)
            heads = slice(share.first_head, share.first_head + share.num_heads)
            group_size = int(record["group_size"])
            q_heads = slice(heads.start * group_size, heads.stop * group_size)
            self._pieces.append(Piece(number, rows, q_heads, heads))
        return records


def layer_memory(num_bytes: int) -> SharedMemory:
    """Make memory for steps of one layer, at least num_bytes."""
    num_bytes = max(num_bytes, LEAST_BYTES)
    with memory_errors(num_bytes):
        memory = SharedMemory(num_bytes, torch.device("cpu"))
    memory.array[READY : READY + 8].view(np.int64)[0] = 1
    return memory


def kind_of(searches: Sequence[RowSearch]) -> tuple[Any, ...]:
    """The key of a LayerStep: everything that it depends on."""
    return tuple(
        (s.context_id, s.q.shape, s.out.kv_indices.shape, s.out.rest is None, s.sink_len, s.window_len, s.softmax_scale)
        for s in searches
    )


def _fill(record: np.void, search: RowSearch, share: Share, end: int) -> int:
    """Fill in a record, and place its flags and arrays, in words of 4 bytes, from byte `end` on. Returns their end."""
    num_q_heads, head_dim = search.q.shape[1:]
    group_size, top_k = num_q_heads // search.out.valid_len.shape[1], search.out.kv_indices.shape[2]
    record["context"], record["head_dim"], record["group_size"] = search.context_id, head_dim, group_size
    record["num_rows"], record["first_head"], record["num_heads"] = share.num_rows, share.first_head, share.num_heads
    record["top_k"], record["sink_len"], record["window_len"] = top_k, search.sink_len, search.window_len
    record["softmax_scale"] = search.softmax_scale
    record["query_flag_at"], record["flag_value"] = READY, 1
    words = {"choice_flag_at": 2, "q_at": group_size * head_dim, "kv_at": top_k, "len_at": 1}  # per row, head
    if search.out.rest is not None:
        words["rest_at"] = group_size * (head_dim + 2)
    for name, size in words.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        record[name], end = begin, begin + 4 * share.num_rows * share.num_heads * size
    return end
