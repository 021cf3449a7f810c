"""Attention of whole steps with the search on the CPU: placement `host`.

The device holds an index only where the rest is attended to by its codes.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial

import numpy as np
import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.index import LayerIndex
from csattn.search import LayerSearch, SearchPool, SearchSeries, TokenSelections, make_series
from csattn.search.device import DeviceIndexes, IndexShape, SketchShape, to_device
from csattn.sketch import SketchIndex
from offload.step_mail import RowMail, SelectionMail, StepClock
from workers.engine.batch_plan import plan_batches
from workers.engine.beside import Beside
from workers.engine.coded_rest import CodedRest
from workers.engine.far_rows import CachedRows
from workers.engine.resident import ResidentRows
from workers.engine.shape import EngineShape

PATIENCE_S = 1.0  # how often the device is asked whether it has failed, while the host waits for a step's queries


class SearchOnHost:
    """`StepAttention` whose steps are one graph, in which kernels post queries and wait for what the CPU has chosen.

    Beside the graph a thread of the host runs the step's searches, each as soon as its query has arrived. With
    `lookahead`, the CPU searches for a layer while the device computes the layer before it.
    """

    in_graph = True

    def __init__(
        self, shape: EngineShape, index: IndexShape, far: CachedRows, pool: SearchPool, device: torch.device
    ) -> None:
        self.shape, self.far = shape, far
        self.lookahead = bool(shape.search.lookahead)
        self.tails = shape.make_tails(device)
        self._pool, self._device = pool, device
        self._resident = ResidentRows(shape, device)
        self._plans = plan_batches(shape, device)
        self._indexes: DeviceIndexes | None = None  # for the rest
        self._coded_rest: CodedRest | None = None
        if shape.rest == "sketch":
            assert isinstance(index, SketchShape)
            sizes = shape.num_layers, shape.num_contexts, shape.search, device, shape.max_segments
            self._indexes = DeviceIndexes(*sizes)
            self._coded_rest = CodedRest(shape, index, self._indexes, device)
        self._clock = StepClock(shape.num_layers + 1, device)
        self._mail = {size: _StepMail(shape, size, device) for size in self._plans}
        self._beside = Beside("step-searches")
        self._searching: Future[None] | None = None  # for the step at hand
        self._give_up = np.zeros(1, np.int64)  # 1: its queries will not come

    def __repr__(self) -> str:
        return f"<SearchOnHost {self._pool!r}, {self.far!r}>"

    def load(self, context_id: int, kv: Sequence[Tensor], index: Sequence[LayerIndex | SketchIndex]) -> None:
        """Give a place to a context whose rows `far` has. No step may be in flight."""
        context_len = self.shape.require_context(kv)
        self._resident.load(context_id, kv)
        if self._indexes is not None:
            self._indexes.load(context_id, context_len, [to_device(layer, self._device) for layer in index])
        for mail in self._mail.values():
            mail.load(context_id, index)

    def unload(self, context_id: int) -> None:
        """Forget a context. No step may be in flight."""
        for mail in self._mail.values():
            mail.unload(context_id)
        if self._indexes is not None:
            self._indexes.unload(context_id)

    def chosen(self, layer_idx: int, rows: StepRows) -> DeviceSelection:
        """What the step has selected in that layer, until it searches for the layer after the next."""
        return self._plans[rows.batch_size].selection(layer_idx)

    def begin_step(self, rows: StepRows) -> None:
        if self._searching is not None:
            self._abandon()  # the step before has met an error and was never ended
        mail = self._mail[rows.batch_size]
        self._clock.advance()
        series = mail.series(tuple(rows.context_ids.tolist()))
        self._searching = self._beside.start(partial(self._search, mail, series, self._clock.value(0)))

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._mail[rows.batch_size].post(layer_idx, q, self._clock)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        mail, plan = self._mail[rows.batch_size], self._plans[rows.batch_size]
        if not self.lookahead or layer_idx == 0:
            mail.post(layer_idx, q, self._clock)
        selection = plan.selection(layer_idx)
        if self._coded_rest is not None:
            self._coded_rest.sum_up(layer_idx, q, rows)  # while the CPU searches
        mail.fetch(layer_idx, selection, rows, self._clock)
        fetched = self.far.fetch(layer_idx, selection, rows.context_ids)
        if self._coded_rest is not None:
            self._coded_rest.post(layer_idx, selection, rows, plan.attention)
        plan.attend(layer_idx, q, self._resident, self.tails, self.far, fetched, rows, out)

    def end_step(self, rows: StepRows) -> None:
        """Return when all searches of the step are done; raises what they, or the device before them, have raised."""
        assert self._searching is not None, "no step was begun"
        while True:
            try:
                self._searching.result(PATIENCE_S)
            except NotYet:
                self._require_sound_device()
            else:
                break
        self._searching = None

    def _search(self, mail: "_StepMail", series: SearchSeries, since: int) -> None:
        done = False
        try:
            done = self._pool.run_series(series, since, self._give_up)
        finally:
            if not done:
                mail.release(since + self.shape.num_layers)  # the device must not wait for what does not come

    def _require_sound_device(self) -> None:
        """Raise if it has met an error: no query will come from it."""
        if self._device.type == "cuda":
            try:
                torch.cuda.current_stream(self._device).query()
            except RuntimeError:
                self._abandon()
                raise

    def _abandon(self) -> None:
        """End the searches of a step whose queries do not come."""
        assert self._searching is not None
        self._give_up[0] = 1
        self._searching.exception()
        self._give_up[0] = 0
        self._searching = None


class _StepMail:
    """What steps of one batch size and the host send each other.

    Two mails serve all layers in turn. Queries of layer l + 2 are posted after the selections of layer l are fetched:
    once they have arrived, the selections have been read and may be written again.
    """

    def __init__(self, shape: EngineShape, batch_size: int, device: torch.device) -> None:
        self._shape = shape
        query = shape.num_q_heads, shape.head_dim
        self._queries = [RowMail(batch_size, query, torch.float32, device) for _ in range(2)]
        heads, max_top_k = shape.num_index_heads, shape.max_top_k
        self._selections = [SelectionMail(batch_size, heads, max_top_k, device) for _ in range(2)]
        self._indexes: dict[int, list[LayerIndex | SketchIndex]] = {}
        self._searches: dict[tuple[int, int, int], LayerSearch] = {}  # by layer, row and context
        self._last: tuple[tuple[int, ...], SearchSeries] = (), make_series([], [], [])  # and the rows' contexts

    def post(self, layer_idx: int, q: Tensor, clock: StepClock) -> None:
        self._queries[layer_idx % 2].post(q.float(), clock, layer_idx + 1)

    def fetch(self, layer_idx: int, selection: DeviceSelection, rows: StepRows, clock: StepClock) -> None:
        mail = self._selections[layer_idx % 2]
        mail.fetch(selection.kv_indices, selection.valid_len, rows.context_ids, clock, layer_idx + 1)

    def release(self, value: int) -> None:
        """Raise all flags of selections."""
        for mail in self._selections:
            mail.flags.fill_(value)

    def load(self, context_id: int, index: Sequence[LayerIndex | SketchIndex]) -> None:
        self.unload(context_id)
        self._indexes[context_id] = list(index)

    def unload(self, context_id: int) -> None:
        self._indexes.pop(context_id, None)
        self._searches = {key: search for key, search in self._searches.items() if key[-1] != context_id}
        self._last = (), make_series([], [], [])

    def series(self, contexts: tuple[int, ...]) -> SearchSeries:
        """The searches of a step, layer by layer; contexts: of its rows, -1: idle. No step may be in flight."""
        if self._last[0] == contexts:
            return self._last[1]
        searches, query_flags, choice_flags = [], [], []
        for layer_idx in range(self._shape.num_layers):
            queries, selections = self._queries[layer_idx % 2], self._selections[layer_idx % 2]
            for row, context_id in enumerate(contexts):
                if context_id >= 0:
                    searches.append(self._search(layer_idx, row, context_id))
                    selections.widths[row] = searches[-1].out.kv_indices.shape[2]
                    query_flags.append((queries.flags[row].data_ptr(), layer_idx + 1))
                    choice_flags.append((selections.flags[row].data_ptr(), layer_idx + 1))
        self._last = contexts, make_series(searches, query_flags, choice_flags)
        return self._last[1]

    def _search(self, layer_idx: int, row: int, context_id: int) -> LayerSearch:
        """A row's search in one layer, to be run at every step: its query and its selection have fixed places."""
        key = layer_idx, row, context_id
        if key not in self._searches:
            index, queries = self._indexes[context_id][layer_idx], self._queries[layer_idx % 2]
            config, selections = self._shape.search, self._selections[layer_idx % 2]
            heads, top_k = self._shape.num_index_heads, config.top_k(index.context_len)
            kv_indices = selections.kv_indices[row, : heads * top_k].view(1, heads, top_k).numpy()
            out = TokenSelections(kv_indices, selections.valid_len[row : row + 1].numpy())
            q, scale = queries.rows[row : row + 1].numpy(), self._shape.softmax_scale
            self._searches[key] = LayerSearch(q, index, None, config.sink_len, config.window_len, scale, out)
        return self._searches[key]
