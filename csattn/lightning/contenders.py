"""Choosing keys on a GPU without writing their scores: only contenders are written, a few times k for each query.

Tiles of keys go by in rounds, spread evenly over the sequence, each with growth - 1 times as many as all before. After
a round a query's bar is the k-th best of what it has seen: a key below it is not among the k best and is not written.
So a round has about (growth - 1) * k contenders per query, however many keys there are; scores that rise, fall or
come in runs change little, as every round samples all of the sequence.

The result is exact whatever the scores. Lists of contenders that come to more than they hold lose some; their query is
marked then, and `stream` chooses for it from all of its scores.

Budget on an H200 (790 TFLOP/s in bf16, 4.3 TB/s), 1M queries, 256K keys, ratio 4, k = 512. Products of legal pairs take
2.85 s at the matrix units' peak. Writing all legal scores and reading them once is 550 GB each way, 0.26 s of
bandwidth, and a test of every score. Contenders are some 8500 of each query, 8 bytes each, written and read: 0.14 TB,
0.03 s; four launches of `keep_best`, a block for each query: 0.04 s if a block takes 5 us, four on a multiprocessor.
In the score kernel there are a compare, a slot and a store per score: a fifth more instructions, beside the products.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors
from csattn.lightning.score import Operands
from csattn.lightning.score_kernels import (
    PROGRAMS_PER_SM,
    TILE_SHAPES,
    KeyTiles,
    TileShape,
    append_contenders,
    queries_of_program,
)
from csattn.lightning.topk_device import ENTRY_SOURCES, OTHER_SHARED_BYTES

SOURCES = (*ENTRY_SOURCES, Path(__file__).with_name("contenders.cu"))
THREADS = 256
_NO_BAR = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Lists:
    """How much room contenders have, and how fast rounds grow."""

    lanes: int  # lists of a query: keys of a tile
    depth: int  # entries of a list
    growth: int

    @classmethod
    def for_k(cls, k: int, lanes: int) -> "Lists":
        """Lists that hold two and a half times what is to be expected, and 32 at least."""
        growth = 4 if k <= 1024 else 2  # so that lists of 2048 keys fit shared memory
        return cls(lanes, max(32, -(-5 * (growth - 1) * k // (2 * lanes))), growth)

    def rounds(self, num_keys: int) -> Iterator[KeyTiles]:
        """Tiles round by round, each once: in the first as many as the lists hold whatever the scores are."""
        num_tiles, step = -(-num_keys // self.lanes), 1
        while -(-num_tiles // step) > self.depth:
            step *= self.growth
        yield KeyTiles(step)
        while step > 1:
            step //= self.growth
            yield KeyTiles(step, skipped=self.growth)

    def row_bytes(self, k: int) -> int:
        """Memory of a query: lists and their counts, entries kept and their number, bar."""
        return 8 * self.lanes * self.depth + 4 * self.lanes + 8 * k + 4 + 8


class Contenders:
    """Memory for the queries of a tile, used again for the next."""

    def __init__(self, num_queries: int, k: int, lists: Lists, device: torch.device) -> None:
        self._k = k
        self._lists = lists
        self._entries = torch.empty(num_queries, lists.depth, lists.lanes, dtype=torch.int64, device=device)
        self._counts = torch.empty(num_queries, lists.lanes, dtype=torch.int32, device=device)
        self._kept = torch.empty(num_queries, k, dtype=torch.int64, device=device)
        self._num_kept = torch.empty(num_queries, dtype=torch.int32, device=device)
        self._bar_scores = torch.empty(num_queries, device=device)
        self._bar_indices = torch.empty(num_queries, dtype=torch.int32, device=device)
        self._keep_best = _kernel(k, lists)

    def choose(
        self,
        operands: Operands,  # of at most num_queries queries
        legal_len: Tensor,  # [num_queries] int32
        num_keys: int,  # that any of them may see
        out: Tensor,  # [num_queries, k] int32, contiguous, written
        overflowed: Tensor,  # [num_queries] int32, 1 is written where `out` is not to be trusted
        shape: TileShape | None = None,
    ) -> None:
        """Enqueue all rounds on torch's current stream."""
        num_queries = len(operands.q)
        if not num_queries:
            return
        self._num_kept.zero_()
        self._bar_scores.fill_(-torch.inf)
        self._bar_indices.fill_(_NO_BAR)
        entries, counts = self._entries[:num_queries], self._counts[:num_queries]
        bar = self._bar_scores[:num_queries], self._bar_indices[:num_queries]
        rounds = list(self._lists.rounds(num_keys))
        for tiles in rounds:
            append_contenders(operands, legal_len, tiles, *bar, entries, counts, shape)
            state = entries, counts, self._kept, self._num_kept, *bar, overflowed
            self._keep_best.launch((num_queries, 1, 1), THREADS, *state, out if tiles is rounds[-1] else 0)


def queries_at_a_time(operands: Operands, k: int, workspace_bytes: int) -> int:
    """As many as the workspace has room for, in whole fillings of the device: programs take about equally long."""
    room = workspace_bytes // lists_for(k, operands.q.dtype).row_bytes(k)
    of_program = queries_of_program(operands.q.shape[1], TILE_SHAPES[operands.q.dtype])
    filling = PROGRAMS_PER_SM * num_multiprocessors(operands.q.device) * of_program
    return room // filling * filling or max(of_program, room // of_program * of_program)


def lists_for(k: int, dtype: torch.dtype) -> Lists:
    """For operands of that dtype."""
    return Lists.for_k(k, TILE_SHAPES[dtype].keys)


def _kernel(k: int, lists: Lists) -> CudaKernel:
    capacity = k + lists.lanes * lists.depth
    defines = {
        "THREADS": THREADS,
        "CLUSTER": 1,
        "VECTORS": 0,  # no tiles of scores come by
        "CAPACITY": capacity,
        "BY_POSITION": 0,
        "LANES": lists.lanes,
        "DEPTH": lists.depth,
        "K": k,
    }
    return cuda_kernel(SOURCES, "keep_best", defines, 8 * capacity + OTHER_SHARED_BYTES, early_start=True)
