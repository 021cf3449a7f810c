"""One layer's sparse attention on the device: input sets, plans and outputs, and the calls that use them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.decode.baselines import TOLERANCE, relative_error
from bench.decode.gpu_timing import num_input_sets
from bench.decode.roofline import full_bytes, index_bytes, row_bytes, selected_bytes, table_bytes
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload, clone_index
from bench.timing import gate
from csattn.attention import merge_state
from csattn.attention.device import DeviceAttention, make_row_source
from csattn.batch import make_device_selection, make_step_rows
from csattn.config import IndexConfig, SearchConfig
from csattn.rest import Moments, moments_of
from csattn.rest.device import DeviceMoments, moment_table
from csattn.rest.reference import estimate_rest
from csattn.search.device import DeviceIndexes, DeviceLayerIndex, DeviceSearch, IndexShape
from workers.model_runner.shapes import ModelShape

TAIL_LEN, TAIL_CAPACITY = 64, 256
SET_BYTES = 48 << 30  # device memory that input sets may take
MOST_SETS = 64
LEAST_CALLS = 8  # steps in one graph


class SparseOp:
    """Steps of a batch in one layer after another, each layer for `period` steps."""

    def __init__(
        self,
        work: Workload,
        shape: ModelShape,
        search: SearchConfig,
        index_name: str | None,  # None: nothing is selected, the resident rows alone are attended to
    ) -> None:
        self.work, self.shape, self.search_config = work, shape, search
        self.config: IndexConfig | None = work.recorded.indexes[index_name][0].config if index_name else None
        self.num_index_heads = shape.num_q_heads if self.config and not self.config.share_group else shape.num_kv_heads
        self.resident_bytes = (search.sink_len + search.window_len + TAIL_LEN) * row_bytes(shape)
        self.hbm_bytes = work.batch_size * self._stored_bytes()
        wanted = num_input_sets(work.batch_size * self._read_bytes(), MOST_SETS)
        self.num_sets = int(max(1, min(wanted, SET_BYTES // self.hbm_bytes)))
        self._make_rows()
        self._layers: list[list[DeviceLayerIndex]] = []  # of each request
        if index_name is not None:
            num_distinct = min(self.num_sets, len(work.recorded.indexes[index_name]))
            distinct = [work.index(layer_idx, index_name) for layer_idx in range(num_distinct)]
            self._layers = [
                [clone_index(distinct[i % num_distinct]) for i in range(self.num_sets)] for _ in range(work.batch_size)
            ]
        self.plan(search)

    def plan(self, search: SearchConfig) -> None:
        """Make inputs, outputs and kernels for a schedule; rows and indexes stay."""
        work, shape = self.work, self.shape
        self.search_config, self.period = search, search.search_period
        self.top_k = search.top_k(work.context_len) if self.config else 1
        self.num_calls = max(LEAST_CALLS, self.num_sets * self.period)
        self._make_inputs()
        if self.config is not None:
            self._make_search(self.config)
        self._attention = DeviceAttention(
            batch_size=work.batch_size,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            num_index_heads=self.num_index_heads,
            head_dim=shape.head_dim,
            dtype=DTYPE,
            max_top_k=self.top_k,
            max_resident_len=search.sink_len + search.window_len,
            tail_capacity=TAIL_CAPACITY,
            softmax_scale=shape.softmax_scale,
            device=work.device,
            estimate_rest=search.estimate_rest,
        )
        self._make_moments()

    def search_call(self, i: int) -> Callable[[], None]:
        """Choose by the queries of step i."""
        return lambda: self._search.search(
            self.q[i], self._indexes, self._set_of(i), self._step_rows.context_ids, self.selections[i]
        )

    def attend_call(self, i: int) -> Callable[[], None]:
        """Attend, in step i, to what the last search has selected."""
        resident, far = self._resident[self._set_of(i)], self._far[self._set_of(i)]
        selection = self.selections[i // self.period * self.period]
        moments = self._moments[self._set_of(i)] if self._moments else None
        return lambda: self._attention.attend(
            self.q[i], resident, self.tails, far, selection, self._step_rows, self.out, moments=moments
        )

    def step_call(self, i: int) -> Callable[[], None]:
        """Step i: search if it is time to, attend."""
        search, attend = self.search_call(i), self.attend_call(i)

        def call() -> None:
            if i % self.period == 0:
                search()
            attend()

        return call

    def check(self) -> None:
        """Refuse selections of the wrong number or order, and attention to them that is off."""
        self.step_call(0)()
        group_size = self.shape.num_q_heads // self.num_index_heads
        for request in range(self.work.batch_size):
            for head in range(0, self.shape.num_q_heads, 7):
                kv_head, index_head = head // (self.shape.num_q_heads // self.shape.num_kv_heads), head // group_size
                valid = int(self.selections[0].valid_len[request, index_head])
                gate(valid == self.top_k, f"{valid} rows are selected, {self.top_k} were wanted")
                chosen = self.selections[0].kv_indices[request, index_head, :valid].long()
                gate(bool((chosen.diff() > 0).all()) and int(chosen[0]) >= 0, "selected rows are not ascending")
                parts = [self.rows[0][request][kv_head, chosen], self.resident_rows[0][request][kv_head]]
                seen = torch.cat([*parts, self.tails[request, kv_head, :TAIL_LEN]]).float()
                scores = seen[:, 0] @ self.q[0, request, head].float() * self.shape.softmax_scale
                want = self._with_rest(request, head, valid, scores.softmax(0) @ seen[:, 1], scores.logsumexp(0))
                error = relative_error(self.out[request, head], want)
                gate(error < TOLERANCE, f"attention to the selected rows is off by {error:.3f} in head {head}")

    def _with_rest(self, request: int, head: int, num_chosen: int, out: Tensor, lse: Tensor) -> Tensor:
        """What a query head attends to in step 0, [head_dim]; out, lse: without the estimate of the rest."""
        if not self._moments:
            return out
        q, group_size = self.q[0, request, head].float().cpu(), self.shape.num_q_heads // self.shape.num_kv_heads
        of_head = Moments(self._first_moments.table[head // group_size, None])
        chosen, rows = np.array([[num_chosen]], np.int32), self._middle(self.rows[0][request]).shape[1]
        rest = estimate_rest(q[None, None].numpy(), of_head, chosen, np.array([rows]), self.shape.softmax_scale)
        rest_out, rest_lse = (torch.from_numpy(x[0])[0].to(out.device) for x in rest)
        return merge_state(out, lse, rest_out, rest_lse)[0]

    def _middle(self, kv: Tensor) -> Tensor:
        """The rows of a context that may be selected."""
        return kv[:, self.search_config.sink_len : kv.shape[1] - self.search_config.window_len]

    def _set_of(self, i: int) -> int:
        return i // self.period % self.num_sets

    def _read_bytes(self) -> int:
        """What one request's step reads, about."""
        if self.config is None:
            return self.resident_bytes
        table = table_bytes(self.shape, self.config, self.work.context_len)
        return table + selected_bytes(self.shape, self.work.context_len, self.search_config.keep)

    def _stored_bytes(self) -> int:
        """What one request's rows and index take."""
        if self.config is None:
            return self.resident_bytes
        kv_bytes = full_bytes(self.shape, self.work.context_len)
        return kv_bytes + index_bytes(self.shape, self.config, self.work.context_len)

    def _make_rows(self) -> None:
        distinct = [self.work.rows(layer_idx) for layer_idx in range(min(self.num_sets, NUM_WIDE_LAYERS))]
        self.rows: list[list[Tensor]] = []  # of each set, of each request
        self.resident_rows: list[list[Tensor]] = []
        for i in range(self.num_sets):
            first = distinct[i % len(distinct)]
            window = first[:, -self.search_config.window_len :]
            ends = torch.cat([first[:, : self.search_config.sink_len], window], dim=1)
            self.resident_rows.append([ends.clone() for _ in range(self.work.batch_size)])
            own = [first.clone() for _ in range(self.work.batch_size)] if self.config else self.resident_rows[-1]
            self.rows.append(own)
        self._far = [make_row_source(kv, self.work.device) for kv in self.rows]
        self._resident = [make_row_source(kv, self.work.device) for kv in self.resident_rows]

    def _make_inputs(self) -> None:
        batch_size, shape, device = self.work.batch_size, self.shape, self.work.device
        queries = [self.work.queries(layer_idx) for layer_idx in range(min(NUM_WIDE_LAYERS, self.num_sets))]
        self.q = torch.stack(  # [num_calls, batch_size, num_q_heads, head_dim]
            [queries[self._set_of(i) % len(queries)][i % len(queries[0])] for i in range(self.num_calls)]
        )
        tail_shape = batch_size, shape.num_kv_heads, TAIL_CAPACITY, 2, shape.head_dim
        self.tails = torch.randn(tail_shape, dtype=DTYPE, device=device)
        self.out = torch.full_like(self.q[0], torch.nan)
        self._step_rows = make_step_rows(batch_size, device)
        requests = torch.arange(batch_size, dtype=torch.int32, device=device)
        self._step_rows.context_ids.copy_(requests)
        self._step_rows.tail_ids.copy_(requests)
        self._step_rows.tail_lens.fill_(TAIL_LEN)
        self.selections = [
            make_device_selection(batch_size, self.num_index_heads, self.top_k, device) for _ in range(self.num_calls)
        ]

    def _make_moments(self) -> None:
        """Of each set, where the rest is estimated; every request's at addresses of its own."""
        self._moments: list[DeviceMoments] = []
        if not self.search_config.estimate_rest:
            return
        distinct = [moments_of([self._middle(kv[0])]) for kv in self.rows[:NUM_WIDE_LAYERS]]
        self._first_moments, requests = distinct[0], self.work.batch_size
        tables = [moment_table(moments, self.shape.softmax_scale, DTYPE).to(self.work.device) for moments in distinct]
        num_rows = self._middle(self.rows[0][0]).shape[1] * torch.ones_like(self._step_rows.context_ids)
        self._moments = [
            DeviceMoments(torch.stack([tables[i % len(distinct)]] * requests), num_rows) for i in range(self.num_sets)
        ]

    def _make_search(self, config: IndexConfig) -> None:
        batch_size, context_len = self.work.batch_size, self.work.context_len
        self._indexes = DeviceIndexes(self.num_sets, batch_size, self.search_config, self.work.device)
        for request, layers in enumerate(self._layers):
            self._indexes.load(request, context_len, layers)
        self._search = DeviceSearch(
            index_shape(config, self.shape),
            batch_size=batch_size,
            max_context_len=context_len,
            softmax_scale=self.shape.softmax_scale,
            query_dtype=DTYPE,
            device=self.work.device,
        )


def index_shape(config: IndexConfig, shape: ModelShape) -> IndexShape:
    """What the kernels of a search are compiled for."""
    shared_by = shape.num_q_heads // shape.num_kv_heads if config.share_group else 1
    return IndexShape(
        layout=config.layout,
        num_index_heads=shape.num_q_heads // shared_by,
        group_size=1 if config.pool_group else shared_by,
        pool_size=shared_by if config.pool_group else 1,
        head_dim=shape.head_dim,
        num_subspaces=config.num_subspaces,
        num_centroids=config.num_centroids,
        score_bits=config.score_bits,
        weigh_by_norm=config.weigh_by_norm,
    )
