"""Attention of whole steps with the search on the CPU: placement `host`. The device holds no index at all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.index import LayerIndex
from csattn.search import SearchPool
from csattn.search.run import LayerSearch
from csattn.search.workspace import TokenSelections
from workers.engine.batch_plan import plan_batches
from workers.engine.far_rows import CachedRows
from workers.engine.resident import ResidentRows
from workers.engine.shape import EngineShape


class SearchOnHost:
    """`StepAttention` that runs on the host between graphs: queries go down, selections come up, one copy each.

    With `lookahead`, the CPU searches for a layer while the device computes the layer before it.
    """

    in_graph = False

    def __init__(self, shape: EngineShape, far: CachedRows, pool: SearchPool, device: torch.device) -> None:
        self.shape, self.far = shape, far
        self.lookahead = bool(shape.search.lookahead)
        self.tails = shape.make_tails(device)
        self._pool = pool
        self._resident = ResidentRows(shape, device)
        self._plans = plan_batches(shape, device)
        self._mail = {size: (_Mail(shape, size, device), _Mail(shape, size, device)) for size in self._plans}
        self._indexes: dict[int, list[LayerIndex]] = {}
        self._searches: dict[tuple[int, int, int, int], LayerSearch] = {}  # by batch size, layer, row and context
        self._contexts: list[int] = []  # of the rows of this step
        self._waiting: list[LayerSearch] = []  # of the layer at hand; the pool runs one search at a time

    def __repr__(self) -> str:
        return f"<SearchOnHost {len(self._indexes)}/{self.shape.num_contexts} contexts, {self._pool!r}, {self.far!r}>"

    def load(self, context_id: int, kv: Sequence[Tensor], index: Sequence[LayerIndex]) -> None:
        """Give a place to a context whose rows `far` has. No step may be in flight."""
        self.shape.require_context(kv)
        self._resident.load(context_id, kv)
        self._indexes[context_id] = list(index)
        self._searches = {key: search for key, search in self._searches.items() if key[-1] != context_id}

    def unload(self, context_id: int) -> None:
        """Forget a context. No step may be in flight."""
        del self._indexes[context_id]
        self._searches = {key: search for key, search in self._searches.items() if key[-1] != context_id}

    def chosen(self, layer_idx: int, rows: StepRows) -> DeviceSelection:
        """What the step has selected in that layer, until it searches for the layer after the next."""
        return self._plans[rows.batch_size].selection(layer_idx)

    def begin_step(self, rows: StepRows) -> None:
        self._contexts = rows.context_ids.tolist()

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._mail_of(layer_idx, rows).send(q)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        mail = self._mail_of(layer_idx, rows)
        if not self.lookahead or layer_idx == 0:
            mail.send(q)
            self._start(layer_idx, mail)
        self._finish()
        if self.lookahead and layer_idx + 1 < self.shape.num_layers:
            self._start(layer_idx + 1, self._mail_of(layer_idx + 1, rows))
        plan = self._plans[rows.batch_size]
        selection = plan.selection(layer_idx)
        mail.deliver(selection)
        plan.attention.attend(
            q,
            self._resident.source(layer_idx),
            self.tails[layer_idx],
            self.far.source(layer_idx),
            self.far.fetch(layer_idx, selection, rows.context_ids),
            rows,
            out,
            self.far.spill(layer_idx),
        )

    def end_step(self, rows: StepRows) -> None:
        """Nothing is left to do."""

    def _mail_of(self, layer_idx: int, rows: StepRows) -> "_Mail":
        return self._mail[rows.batch_size][layer_idx % 2]

    def _start(self, layer_idx: int, mail: "_Mail") -> None:
        """Let the pool search for all rows of the step that are not idle."""
        mail.receive()
        for row, context_id in enumerate(self._contexts):
            if context_id < 0:
                mail.clear(row)
                continue
            key = mail.batch_size, layer_idx, row, context_id
            if key not in self._searches:
                self._searches[key] = self._make_search(self._indexes[context_id][layer_idx], mail, row)
            mail.expect(row, self._searches[key].out)
            self._waiting.append(self._searches[key])
        self._waiting.reverse()
        if self._waiting:
            self._pool.start(self._waiting[-1])

    def _finish(self) -> None:
        """Return when all rows of the layer at hand have their selections."""
        while self._waiting:
            self._pool.finish()
            self._waiting.pop()
            if self._waiting:
                self._pool.start(self._waiting[-1])

    def _make_search(self, index: LayerIndex, mail: "_Mail", row: int) -> LayerSearch:
        """A row's search in one layer, to be run at every step: its query and its selection have fixed places."""
        search = self.shape.search
        out = mail.room(row, search.top_k(index.context_len))
        return LayerSearch(
            mail.query(row), index, None, search.sink_len, search.window_len, self.shape.softmax_scale, out
        )


class _Mail:
    """Pinned memory through which one layer's queries go down and its selections come up.

    Two of them serve all layers in turn. Queries of layer l + 2 are sent after selections of layer l are delivered, on
    the same stream: once they have arrived, the selections have been read and may be written again.
    """

    def __init__(self, shape: EngineShape, batch_size: int, device: torch.device) -> None:
        self.batch_size = batch_size
        on_gpu = device.type == "cuda"
        heads = batch_size, shape.num_index_heads
        queries = batch_size, shape.num_q_heads, shape.head_dim
        self._queries = torch.zeros(queries, dtype=torch.float32, pin_memory=on_gpu)
        self._kv_indices = torch.full((*heads, shape.max_top_k), -1, dtype=torch.int32, pin_memory=on_gpu)
        self._valid_len = torch.zeros(heads, dtype=torch.int32, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._narrow: list[tuple[int, TokenSelections]] = []  # rows of shorter contexts, and what is chosen for them

    def send(self, q: Tensor) -> None:
        self._queries.copy_(q.float(), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def receive(self) -> None:
        """Wait until the queries are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._narrow.clear()

    def query(self, row: int) -> NDArray[np.float32]:
        """Where a row's query arrives, [1, num_q_heads, head_dim]."""
        queries: NDArray[np.float32] = self._queries.numpy()[row : row + 1]
        return queries

    def room(self, row: int, top_k: int) -> TokenSelections:
        """Where a row's selection may be written: memory of its own where the context is shorter than the longest."""
        kv_indices, valid_len = self._of_row(row)
        if top_k < kv_indices.shape[2]:
            kv_indices = np.empty((*kv_indices.shape[:2], top_k), np.int32)
        return TokenSelections(kv_indices, valid_len)

    def expect(self, row: int, out: TokenSelections) -> None:
        """A row's selection will be in `out`, which `room` has made."""
        if out.kv_indices.shape[2] < self._kv_indices.shape[2]:
            self._narrow.append((row, out))

    def clear(self, row: int) -> None:
        self._of_row(row)[1].fill(0)

    def deliver(self, selection: DeviceSelection) -> None:
        for row, narrow in self._narrow:
            kv_indices, _ = self._of_row(row)
            kv_indices[:] = -1
            kv_indices[:, :, : narrow.kv_indices.shape[2]] = narrow.kv_indices
        selection.kv_indices.copy_(self._kv_indices, non_blocking=True)
        selection.valid_len.copy_(self._valid_len, non_blocking=True)

    def _of_row(self, row: int) -> tuple[Any, Any]:
        """A row's kv_indices [1, num_index_heads, max_top_k] and valid_len [1, num_index_heads], as numpy arrays."""
        return self._kv_indices.numpy()[row : row + 1], self._valid_len.numpy()[row : row + 1]
