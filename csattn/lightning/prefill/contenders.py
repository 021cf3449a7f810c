"""Top-k on a GPU without writing all scores: only contenders are written, two or three times k of them per query.

Every step-th key is scored first. From this sample, each query gets a threshold, which somewhat more than k / step of
the sample reach, and so somewhat more than k of all keys. Then the other keys are scored, and those that reach the
threshold are listed after those of the sample that do; the k best of the list are chosen. Scores that rise, fall or
come in runs change little, since the sample is spread evenly over the sequence.

The result is exact whatever the scores: all keys that reach the threshold are counted, and if they are fewer than k, or
more than a list holds, the query is marked, and `stream` chooses for it from all of its scores.

Budget on an H200 (790 TFLOP/s in bf16, 4.3 TB/s), 1M queries, 256K keys, ratio 4, k = 512. Products of legal pairs take
2.85 s at the tensor cores' peak. Writing all legal scores and reading them once is 550 GB each way, 0.26 s of
bandwidth, and a test of every score. The sample is a 32nd of that, 8 ms; contenders are some 1400 of each query, 8
bytes each, written and read: 24 GB, 6 ms; both selections, a block for each query: 0.02 s if each of them takes a
multiprocessor 1.1 us a query, as measured with 32K keys.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.score import hopper

SOURCE = Path(__file__).with_name("contenders.cu")
THREADS = 256  # of a block of `choose_best`, at least
MIN_THRESHOLD_THREADS = 32  # of a block of `find_thresholds`, at least
_SCORES_EACH, _ENTRIES_EACH = 32, 10  # in a thread's registers; more if a block would have over 1024 threads
_BIN_BYTES = 2048 * 4 + 1024  # of shared memory: bins, and a little more
MAX_CAPACITY = 24576  # entries that fit in shared memory
_LEAST_STEP = 8
_SAMPLE_LEN = 4096  # scores of a query's sample, about, where step is below 32
_LEAST_CAPACITY = 2048


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many keys are sampled, and what follows from that for thresholds and lists."""

    step: int  # every step-th key is in the sample
    wanted: int  # at least so many scores of the sample reach the threshold; at most an eighth more
    capacity: int  # entries of a list

    @classmethod
    def of(cls, num_keys: int, k: int) -> "Sampling":
        """Choose so that, of scores in random order, one query in a million has too few contenders, or too many."""
        step = _LEAST_STEP
        while (num_keys > _SAMPLE_LEN * step and step < 32) or num_keys > MAX_CAPACITY * step:
            step *= 2
        expected = k / step  # so many of the k best are in the sample
        wanted = math.ceil(expected + 5 * math.sqrt(expected)) + 4
        # the keys after the last whole block may all be contenders
        most = step * (1.125 * wanted + 6 * math.sqrt(wanted)) + step * hopper.KEYS
        return cls(step, wanted, max(_LEAST_CAPACITY, -(-int(most) // 1024) * 1024))

    def sample_len(self, num_keys: int) -> int:
        """How many scores the sample has: those of whole blocks."""
        return num_keys // (hopper.KEYS * self.step) * hopper.KEYS


class Contenders:
    """Workspace for the queries of a tile, reused for the next tile: a row is first a sample, then a list."""

    def __init__(self, num_queries: int, num_keys: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._sample_len = sampling.sample_len(num_keys)
        row_len = _row_len(sampling, self._sample_len)
        self._lists = torch.empty(num_queries, row_len, dtype=torch.int64, device=device)
        numbers = torch.empty(3, num_queries, dtype=torch.int32, device=device)
        self._counts, self._threshold_indices = numbers[0], numbers[1]
        self._threshold_scores = numbers[2].view(torch.float32)

    def choose(
        self,
        operands: Operands,  # of at most num_queries queries, and num_keys keys
        legal_len: Tensor,  # [num_queries] int32
        tile_max_lens: Tensor,  # [query tiles] int32: the greatest legal_len of each query tile
        out: Tensor,  # [num_queries, k] int32, contiguous, written
        overflowed: Tensor,  # [num_queries] int32, written: 1 where `out` is invalid, else 0
    ) -> None:
        """Enqueue the choice on torch's current stream."""
        (num_queries, k), sampling = out.shape, self._sampling
        if not num_queries:
            return
        lists, counts = self._lists[:num_queries], self._counts[:num_queries]
        thresholds = self._threshold_scores[:num_queries], self._threshold_indices[:num_queries]
        every_step_th, grid = range(0, len(operands.k), sampling.step), (num_queries, 1, 1)
        sample = lists.view(torch.float32)[:, : self._sample_len]
        hopper.write_scores(operands, every_step_th, tile_max_lens, sample)
        row_len = lists.shape[1]
        query_tile = hopper.queries_of_tile(operands.q.shape[1])
        sizes = sampling.capacity, query_tile, hopper.KEYS, sampling.step, sampling.wanted
        find_thresholds, threads = _thresholds_kernel(self._sample_len)
        find_thresholds.launch(
            grid, threads, lists, tile_max_lens, legal_len, counts, *thresholds, row_len, *map(np.uint32, sizes)
        )
        hopper.list_contenders(operands, tile_max_lens, legal_len, sampling.step, *thresholds, lists, counts)
        choose_best, threads = _choice_kernel(sampling.capacity)
        choose_best.launch(grid, threads, lists, counts, legal_len, overflowed, out, row_len, k)


def queries_at_a_time(operands: Operands, sampling: Sampling, workspace_bytes: int) -> tuple[int, int]:
    """Return how many queries fill the device, or else a query tile, and the multiple that fits the workspace."""
    row_bytes = 8 * _row_len(sampling, sampling.sample_len(len(operands.k))) + 12
    room, tile = workspace_bytes // row_bytes, hopper.queries_of_tile(operands.q.shape[1])
    filling = num_multiprocessors(operands.q.device) * tile
    if room < filling:
        filling = tile
    return filling, max(filling, room // filling * filling)


def _row_len(sampling: Sampling, sample_len: int) -> int:
    """Entries of a row, for its sample or its list: even, so that vectors of four scores are aligned."""
    return max(sampling.capacity, sample_len // 2) + 1 & ~1


def _thresholds_kernel(sample_len: int) -> tuple[CudaKernel, int]:
    """Return `find_thresholds`, compiled for few lengths, and the threads of a block, of which each query has one."""
    capacity = 1 << max(10, (sample_len - 1).bit_length())
    threads = min(1024, max(MIN_THRESHOLD_THREADS, capacity // _SCORES_EACH))
    defines = {"THREADS": threads, "CLUSTER": 1, "CAPACITY": capacity}
    return cuda_kernel(SOURCE, "find_thresholds", defines, early_start=True), threads


def _choice_kernel(capacity: int) -> tuple[CudaKernel, int]:
    """Return `choose_best` and the threads of a block, of which each query has one."""
    threads = THREADS
    while threads < 1024 and capacity > _ENTRIES_EACH * threads:
        threads *= 2
    defines = {"THREADS": threads, "CLUSTER": 1, "CAPACITY": capacity}
    return cuda_kernel(SOURCE, "choose_best", defines, 8 * capacity + _BIN_BYTES, early_start=True), threads
