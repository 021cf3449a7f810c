"""Attention of whole steps with the search on the CPU: placement `host`.

The threads or search workers that search map the memory that queries arrive in and selections return through. The
device holds an index only if it attends to the rest by codes.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.search.device import DeviceLayerIndex, IndexShape, SketchShape
from offload.shared_memory import SharedMemory, piece_bytes
from offload.step_mail import RowMail, SelectionMail, StepClock
from workers.background import BackgroundThread
from workers.engine.gpu.attend_chosen import AttendChosen, make_passes
from workers.engine.gpu.far_rows import CachedRows
from workers.engine.gpu.own_on_device import OwnOnDevice
from workers.engine.gpu.shape import EngineShape
from workers.searchers.step_searches import GIVE_UP, STEP_SEARCH, StepPlan, StepSearches
from workers.searchers.worker_searcher import WorkerSearcher

StepSearcher = StepSearches | WorkerSearcher  # searches whole steps: by threads of this process, or by search workers
PLACES = "q_at", "kv_at", "len_at", "query_flag_at", "choice_flag_at"  # offsets of a row's parts in the shared memory
_RowRequest = tuple[int, int]  # of a row: its context (-1: idle), and how many rows it chooses
DEVICE_CHECK_S = 1.0  # between checks whether the device has failed, while the host waits for a step's queries


class SearchOnHost(AttendChosen):
    """A step is one CUDA graph, whose kernels post queries and wait for the CPU's selections.

    Beside the graph, a host thread runs the step's searches, each as soon as its query has arrived. With `lookahead`,
    the CPU searches a layer while the device computes the layer before it.
    """

    def __init__(
        self,
        shape: EngineShape,
        index: IndexShape,
        far: CachedRows,
        searcher: StepSearcher,
        device: torch.device,
        tails: Tensor | None = None,
        own: OwnOnDevice | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """searcher: must have every context that is loaded here, under the same id."""
        super().__init__(shape, far, device, tails, own, sinks)
        self._searcher, self._device = searcher, device
        if shape.rest == "sketch":
            assert isinstance(index, SketchShape)
            self._passes = make_passes(shape, index, device)
        self.reads_index = bool(self._passes)
        self._clock = StepClock(shape.num_layers + 1, device)
        self._memory = SharedMemory(piece_bytes((1,), torch.int64) + _mail_bytes(shape), device)
        self._give_up = self._memory.zeros((1,), torch.int64)  # 1: the step's queries will not arrive
        self._mail = {size: _StepMail(shape, size, self._memory) for size in shape.batch_sizes}
        self._top_ks = {-1: 0}  # the most rows that a row may choose, by its context
        assert self._memory.place_of(self._give_up) == GIVE_UP
        try:
            searcher.attach(self._memory)
        except BaseException:
            self._memory.close()
            raise
        self._background = BackgroundThread("step-searches")
        self._searching: Future[None] | None = None  # of the current step

    def load(
        self,
        context_id: int,
        kv: Sequence[Tensor],
        index: Iterable[DeviceLayerIndex],
        plain: Sequence[Tensor] | None = None,
    ) -> None:
        super().load(context_id, kv, index, plain)
        self._top_ks[context_id] = self.shape.search.top_k(kv[0].shape[1])

    def close(self) -> None:
        """Unpin and free the shared memory. No step may be in flight, or follow."""
        self._memory.close()

    def begin_step(self, rows: StepRows) -> None:
        self.abandon()  # the step before, if it was never ended
        mail = self._mail[rows.batch_size]
        self._clock.advance()
        super().begin_step(rows)
        asked = zip(*torch.stack([self._schedule.search_ids(rows), rows.top_ks]).tolist(), strict=True)
        plan = mail.plan(tuple((context_id, min(top_k, self._top_ks[context_id])) for context_id, top_k in asked))
        self._searching = self._background.start(partial(self._search, mail, plan, self._clock.value(0)))

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._mail[rows.batch_size].post(layer_idx, q, self._clock)
        if (own := self._own(rows)) is not None:
            own.look_ahead(layer_idx, q, rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        mail = self._mail[rows.batch_size]
        if not self.lookahead or layer_idx == 0:
            mail.post(layer_idx, q, self._clock)
        selection = self.chosen(layer_idx, rows)
        if (own := self._own(rows)) is not None:
            own.begin(layer_idx, q, rows)
        if self._passes:  # while the CPU searches
            self._passes[rows.batch_size].run(q, self.indexes, layer_idx, rows.context_ids)
        mail.fetch(layer_idx, selection, self._schedule.search_ids(rows), self._clock)
        self._schedule.distribute_choices(layer_idx, selection, rows)
        fetched = self.far.fetch(layer_idx, selection, rows.context_ids)
        self._post_rest(layer_idx, rows)
        self._attend(layer_idx, q, fetched, rows, out)

    def end_step(self, rows: StepRows) -> None:
        """Wait until all searches of the step are done. Raises their error, or that of the device."""
        assert self._searching is not None, "no step was begun"
        while True:
            try:
                self._searching.result(DEVICE_CHECK_S)
            except NotYet:
                self._require_sound_device()
            else:
                break
        self._searching = None

    def _search(self, mail: "_StepMail", plan: StepPlan, since: int) -> None:
        done = False
        try:
            done = self._searcher.run_step(plan, since)
        finally:
            if not done:
                mail.release(since + self.shape.num_layers)  # or the device waits for ever

    def abandon(self) -> None:
        """End the searches of a step that has failed: its queries will not arrive, and the next load would wait."""
        if self._searching is not None:
            self._give_up[0] = 1
            self._searching.exception()
            self._give_up[0] = 0
            self._searching = None

    def _require_sound_device(self) -> None:
        """Raise if the device has failed, because no query will arrive from it."""
        if self._device.type == "cuda":
            try:
                torch.cuda.current_stream(self._device).query()
            except RuntimeError:
                self.abandon()
                raise


class _StepMail:
    """Exchanges queries and selections between the steps of one batch size and the searcher.

    Double buffering: all layers use two mails in turn. Queries of layer l + 2 are posted after the selections of layer
    l are fetched, so when they arrive, those selections have been read and may be overwritten.
    """

    def __init__(self, shape: EngineShape, batch_size: int, memory: SharedMemory) -> None:
        self._shape, self._memory = shape, memory
        self._queries = [RowMail(*_query_sizes(shape, batch_size), memory) for _ in range(2)]
        self._selections = [SelectionMail(*_selection_sizes(shape, batch_size), memory) for _ in range(2)]
        self._last: tuple[tuple[_RowRequest, ...], StepPlan] | None = None  # the last plan, by what its rows asked for

    def post(self, layer_idx: int, q: Tensor, clock: StepClock) -> None:
        self._queries[layer_idx % 2].post(q.float(), clock, layer_idx + 1)

    def fetch(self, layer_idx: int, selection: DeviceSelection, search_ids: Tensor, clock: StepClock) -> None:
        mail = self._selections[layer_idx % 2]
        mail.fetch(selection.kv_indices, selection.valid_len, search_ids, clock, layer_idx + 1)

    def release(self, value: int) -> None:
        """Raise all flags of selections, so that no kernel waits for one."""
        for mail in self._selections:
            mail.flags.fill_(value)

    def plan(self, row_requests: tuple[_RowRequest, ...]) -> StepPlan:
        """Return the searches of a step, given what its rows ask for. No step may be in flight."""
        if self._last is None or self._last[0] != row_requests:
            self._last = row_requests, StepPlan(self._records(row_requests))
        return self._last[1]

    def _records(self, row_requests: tuple[_RowRequest, ...]) -> NDArray[np.void]:
        shape, config = self._shape, self._shape.search
        in_use = [(row, *of_row) for row, of_row in enumerate(row_requests) if of_row[0] >= 0]
        records = np.zeros((shape.num_layers, len(in_use)), STEP_SEARCH)
        records["layer"] = np.arange(shape.num_layers)[:, None]
        records["flag_value"] = records["layer"] + 1
        records["num_rows"] = 1
        records["num_heads"], records["head_dim"] = shape.num_index_heads, shape.head_dim
        records["group_size"] = shape.num_q_heads // shape.num_index_heads
        records["sink_len"], records["window_len"] = config.sink_len, config.window_len
        records["softmax_scale"] = shape.softmax_scale
        for i, (row, context_id, top_k) in enumerate(in_use):
            of_row = records[:, i]
            of_row["context"], of_row["top_k"] = context_id, top_k
            for parity, (queries, selections) in enumerate(zip(self._queries, self._selections, strict=True)):
                selections.widths[row] = top_k
                places = queries.rows, selections.kv_indices, selections.valid_len, queries.flags, selections.flags
                for name, piece in zip(PLACES, places, strict=True):
                    of_row[name][parity::2] = self._memory.place_of(piece[row])
        return records


def _query_sizes(shape: EngineShape, batch_size: int) -> tuple[int, tuple[int, int], torch.dtype]:
    return batch_size, (shape.num_q_heads, shape.head_dim), torch.float32


def _selection_sizes(shape: EngineShape, batch_size: int) -> tuple[int, int, int]:
    return batch_size, shape.num_index_heads, shape.max_top_k


def _mail_bytes(shape: EngineShape) -> int:
    """Bytes of the mails of all batch sizes."""
    queries = sum(RowMail.num_bytes(*_query_sizes(shape, size)) for size in shape.batch_sizes)
    selections = sum(SelectionMail.num_bytes(*_selection_sizes(shape, size)) for size in shape.batch_sizes)
    return 2 * (queries + selections)
