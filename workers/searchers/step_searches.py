"""Searches as records: those of a step, layer after layer, each started as soon as its queries are there.

Queries, choices and flags are in memory that search workers share with an engine, and with its device. A record
describes a search by offsets in it. A process that runs a step runs all of its records, or those of some heads.
"""

from collections.abc import Sequence
from itertools import count, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.artifact.share import index_of_heads
from csattn.errors import SearchLostError
from csattn.index import ListIndex
from csattn.search import LayerSearch, SearchPool, SearchSeries, TokenSelections
from csattn.sketch import SketchIndex
from offload.shared_memory import SharedMemory, array_in
from workers.searchers.shares import shares_of

MAX_PLANS = 64  # plans whose searches are cached: enough for the kinds of steps that recur
MAX_KEPT = 1 << 14  # records whose searches are cached, of all plans together
GIVE_UP = 0  # offset in the memory of the word that is set (not 0) when no more queries will come

# A search in one layer for consecutive index heads; if `StepPlan` is to divide it among workers, of one row. The `_at`
# fields are byte offsets in the memory, for the first of these heads; rest_at 0: the rest is not wanted. Flags: see
# `csattn.search.SearchSeries`; the value of all is `flag_value`, and each head has a choice flag.
STEP_SEARCH = np.dtype(
    [
        *((name, np.int64) for name in ("layer", "context", "num_rows", "first_head", "num_heads", "group_size")),
        *((name, np.int64) for name in ("head_dim", "top_k", "sink_len", "window_len")),
        ("softmax_scale", np.float64),
        *((name, np.int64) for name in ("q_at", "kv_at", "len_at", "rest_at")),
        *((name, np.int64) for name in ("query_flag_at", "choice_flag_at", "flag_value")),
    ]
)
_numbers = count(1)


class StepPlan:
    """The searches of a step, made once for all steps with the same rows."""

    def __init__(self, records: NDArray[np.void], shares: Sequence[NDArray[np.void]] = ()) -> None:
        """records: [num_layers, num_rows] of STEP_SEARCH. If `share` is to divide them, all records of a layer have the
        same heads and rest_at 0. shares: the records of each worker, if they are divided already."""
        self.records = records
        self.number = next(_numbers)  # unique in this process
        self._shares = {(worker, len(shares)): share for worker, share in enumerate(shares)}

    def share(self, worker: int, num_workers: int) -> NDArray[np.void]:
        """Return the records of one of several workers: [num_layers, some], consecutive heads of some rows."""
        kept = self._shares.get((worker, num_workers))
        if kept is None:
            num_rows, num_heads = self.records.shape[1], int(self.records["num_heads"].max(initial=0))
            shares = shares_of(worker, num_workers, num_rows, num_heads)
            parts = [self.records[:, :0]]
            for share in shares:
                rows = self.records[:, share.first_row : share.first_row + share.num_rows]
                parts.append(_of_heads(rows, share.first_head, share.num_heads))
            kept = self._shares[worker, num_workers] = np.concatenate(parts, axis=1)
        return kept


def _of_heads(records: NDArray[np.void], first_head: int, num_heads: int) -> NDArray[np.void]:
    assert not records["rest_at"].any(), "sums of the rest are not divided among workers"
    some = records.copy()
    some["first_head"] += first_head
    some["num_heads"] = num_heads
    some["q_at"] += first_head * some["group_size"] * some["head_dim"] * 4
    some["kv_at"] += first_head * some["top_k"] * 4
    some["len_at"] += first_head * 4
    some["choice_flag_at"] += first_head * 8
    return some


def progress_of(memory: NDArray[np.uint8], records: NDArray[np.void], since: int) -> tuple[int, bool]:
    """Return how many records are done, and whether the next one's queries are still missing.

    records: one worker's, in the order in which it runs them.
    """
    words, wanted = memory[: len(memory) // 8 * 8].view(np.int64), records["flag_value"] + since
    done = words[records["choice_flag_at"] // 8 + records["num_heads"] - 1] >= wanted
    num_done = int(done.sum())
    if num_done == len(records):
        return num_done, False
    next_one = int(np.argmin(done))
    return num_done, bool(words[records["query_flag_at"][next_one] // 8] < wanted[next_one])


class StepSearches:
    """Runs records over loaded contexts, in a pool of threads. Results do not depend on which process searches what.

    In all methods, `since` is added to the records' flag values, so that flags need not be cleared between steps.
    """

    def __init__(self, pool: SearchPool) -> None:
        self.pool = pool
        self._layers: dict[int, Sequence[ListIndex | SketchIndex]] = {}
        self._plans: dict[int, NDArray[np.void]] = {}  # records, by the plan's number
        self._series: dict[tuple[int, int], list[SearchSeries]] = {}  # by the plan's number and layer
        self._searches: dict[bytes, LayerSearch] = {}  # by record
        self.attach(np.zeros(GIVE_UP + 8, np.uint8))

    def attach(self, memory: SharedMemory | NDArray[np.uint8]) -> None:
        """Use this memory from now on: records' offsets refer to it."""
        self._forget()
        self.memory = memory.array if isinstance(memory, SharedMemory) else memory
        self.give_up = self.memory[GIVE_UP : GIVE_UP + 8].view(np.int64)  # not 0: the step is given up

    def load(self, context_id: int, artifact: Artifact) -> None:
        """Load a context: check every layer's index, and search once, so that later searches compile and open
        nothing."""
        indexes = artifact.indexes()
        self.load_layers(context_id, indexes)
        if indexes:
            self.pool.search_layers([_first_search(artifact)])

    def load_layers(self, context_id: int, layers: Sequence[ListIndex | SketchIndex]) -> None:
        self._forget()
        self._layers[context_id] = layers

    def unload(self, context_id: int) -> None:
        self._forget()
        self._layers.pop(context_id, None)

    def run_step(self, plan: StepPlan, since: int) -> bool:
        """Search a whole step in this thread and the pool's; false if it was given up."""
        if plan.number not in self._plans:
            self.keep(plan.number, plan.records)
        return self.run(plan.number, 0, since)

    def keep(self, plan: int, records: NDArray[np.void]) -> None:
        """Keep records under a plan's number, until contexts or the memory change, or MAX_PLANS others have come."""
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
            self._series.clear()
        self._plans[plan] = records

    def run(self, plan: int, layer_idx: int, since: int) -> bool:
        """Run the records of a kept plan, with layer_idx added to their layers; false if the step is given up."""
        if (plan, layer_idx) not in self._series:
            self._series[plan, layer_idx] = self._make_series(in_layer(self._plans[plan], layer_idx))
        return self._run(self._series[plan, layer_idx], since, self.give_up)

    def run_records(self, records: NDArray[np.void], since: int, give_up: NDArray[np.int64]) -> bool:
        """Run the records that are not done yet; false if the word `give_up` was set before the last query came."""
        return self._run(self._make_series(records), since, give_up)

    def close(self) -> None:
        self.pool.close()
        self._forget()
        self._layers.clear()

    def _forget(self) -> None:
        """Drop all cached searches: they hold references to indexes and to the memory."""
        self._plans.clear()
        self._series.clear()
        self._searches.clear()

    def _run(self, parts: Sequence[SearchSeries], since: int, give_up: NDArray[np.int64]) -> bool:
        return all(self.pool.run_series(part, since, give_up) for part in parts)

    def _make_series(self, records: NDArray[np.void]) -> list[SearchSeries]:
        """Make a series of each run of consecutive records with the same kind of index."""
        base, flagged = int(self.memory.ctypes.data), []
        for record in records.reshape(-1):
            value = int(record["flag_value"])
            arrived = base + int(record["query_flag_at"]), value
            chosen = base + int(record["choice_flag_at"]), value, int(record["num_heads"])
            flagged.append((self._search(record), arrived, chosen))
        parts = groupby(flagged, lambda one: isinstance(one[0].index, SketchIndex))
        return [SearchSeries(*zip(*part, strict=True)) for _, part in parts]

    def _search(self, record: np.void) -> LayerSearch:
        key = record.tobytes()
        if key not in self._searches:
            if len(self._searches) >= MAX_KEPT:
                self._searches.clear()
            self._searches[key] = self._make_search(record)
        return self._searches[key]

    def _make_search(self, record: np.void) -> LayerSearch:
        context, layer = int(record["context"]), int(record["layer"])
        if context not in self._layers:
            raise SearchLostError(f"context {context} is not loaded here; load it before it is searched")
        heads = slice(int(record["first_head"]), int(record["first_head"] + record["num_heads"]))
        index, (q, out) = index_of_heads(self._layers[context][layer], heads), arrays_of(self.memory, record)
        resident = int(record["sink_len"]), int(record["window_len"])
        return LayerSearch(q, index, None, *resident, float(record["softmax_scale"]), out)


def in_layer(records: NDArray[np.void], layer_idx: int) -> NDArray[np.void]:
    """A copy of the records, with layer_idx added to their layers."""
    records = records.copy()
    records["layer"] += layer_idx
    return records


def arrays_of(memory: NDArray[np.uint8], record: np.void) -> tuple[NDArray[np.float32], TokenSelections]:
    """Views of the memory: the record's queries [num_rows, num_q_heads, head_dim], and its selections to be filled."""
    of: dict[str, Any] = dict(zip(STEP_SEARCH.fields or (), record.item(), strict=True))
    rows, heads, head_dim = of["num_rows"], of["num_heads"], of["head_dim"]
    q = array_in(memory, of["q_at"], (rows, heads * of["group_size"], head_dim), np.float32)
    rest = array_in(memory, of["rest_at"], (*q.shape[:2], head_dim + 2), np.float32) if of["rest_at"] else None
    kv_indices = array_in(memory, of["kv_at"], (rows, heads, of["top_k"]), np.int32)
    return q, TokenSelections(kv_indices, array_in(memory, of["len_at"], (rows, heads), np.int32), rest)


def _first_search(artifact: Artifact) -> LayerSearch:
    """A warm-up search, with all stages that a search of the context may have; its result is not used."""
    model, num_heads = artifact.spec.model, artifact.spec.num_index_heads
    q = np.ones((1, model.num_q_heads, model.head_dim), np.float32)
    index, rest = artifact.indexes()[0], None
    if isinstance(index, SketchIndex):
        rest = np.empty((1, model.num_q_heads, model.head_dim + 2), np.float32)
    out = TokenSelections(np.empty((1, num_heads, 1), np.int32), np.empty((1, num_heads), np.int32), rest)
    return LayerSearch(q, index, None, 0, 0, 1.0, out)
