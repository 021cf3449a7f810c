"""Threads for searches. Kernels release the GIL; what a search chooses does not depend on who runs it."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from csattn.index import LayerIndex
from csattn.search.run import LayerSearch
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.table.tail import Tail

# Handing work to a thread costs about 17 us: what takes less than a few times that stays with the caller.
SMALL_WORK_KEYS = 1 << 17  # scored keys, summed over query rows: some tens of microseconds
TICKET_KEYS = 1 << 16  # least work that a thread takes at a time, where there is enough for all


class SearchPool:
    """num_threads threads, the calling one included. Close it, or use it as a context manager."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1, f"a pool needs at least 1 thread, got {num_threads}"
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads - 1, "search") if num_threads > 1 else None
        self._local = threading.local()

    def search(
        self,
        q: NDArray[np.float32],  # [num_q_heads, head_dim]
        index: LayerIndex,
        tail: Tail | None,
        top_k: int,
        sink_len: int,
        window_len: int,
        softmax_scale: float,
        out: Selection,  # kv_indices [num_heads, top_k]
    ) -> None:
        """`csattn.search.search`, its heads shared out among the threads."""
        assert out.kv_indices.shape[1] == top_k, f"out has room for {out.kv_indices.shape[1]} rows, wanted {top_k}"
        stacked = TokenSelections(out.kv_indices[None], out.valid_len[None])
        self.search_layers([LayerSearch(q[None], index, tail, sink_len, window_len, softmax_scale, stacked)])

    def search_tokens(
        self,
        q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
        index: LayerIndex,
        tail: Tail | None,
        top_k: int,
        sink_len: int,
        window_len: int,
        softmax_scale: float,
    ) -> TokenSelections:
        """`csattn.search.search_tokens`, its heads and tokens shared out among the threads."""
        out = empty_token_selections(q.shape[0], index.num_heads, top_k)
        self.search_layers([LayerSearch(q, index, tail, sink_len, window_len, softmax_scale, out)])
        return out

    def search_layers(self, layers: Sequence[LayerSearch]) -> None:
        """Run several searches at once, over different layers, requests or both; return when all are done."""
        for layer in layers:
            layer.check()
        work = [ticket for layer in layers for ticket in self._tickets(layer)]
        helpers = min(self.num_threads, len(work)) - 1
        if helpers < 1 or self._executor is None or sum(layer.num_scored_keys for layer in layers) < SMALL_WORK_KEYS:
            for layer in layers:
                layer.run(0, layer.num_jobs, self._workspace())
            return
        tickets = itertools.count()  # next() on it is atomic: every run of jobs is taken once
        running: list[Future[None]] = [self._executor.submit(self._take_jobs, work, tickets) for _ in range(helpers)]
        try:
            self._take_jobs(work, tickets)
        finally:
            for future in running:
                future.result()

    def _tickets(self, layer: LayerSearch) -> list[tuple[LayerSearch, int, int]]:
        """The layer's jobs, cut into runs of jobs."""
        jobs = max(1, TICKET_KEYS * layer.num_jobs // max(1, layer.num_scored_keys))
        jobs = min(jobs, max(1, layer.num_jobs // self.num_threads))
        return [(layer, first, min(first + jobs, layer.num_jobs)) for first in range(0, layer.num_jobs, jobs)]

    def _take_jobs(self, work: Sequence[tuple[LayerSearch, int, int]], tickets: "itertools.count[int]") -> None:
        workspace = self._workspace()
        while (ticket := next(tickets)) < len(work):
            layer, first_job, last_job = work[ticket]
            layer.run(first_job, last_job, workspace)

    def _workspace(self) -> SearchWorkspace:
        """The calling thread's own."""
        if not hasattr(self._local, "workspace"):
            self._local.workspace = SearchWorkspace()
        workspace: SearchWorkspace = self._local.workspace
        return workspace

    def close(self) -> None:
        """Let the threads go. Searches that run are finished first."""
        if self._executor is not None:
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SearchPool {self.num_threads} threads>"
