"""`CpuEngine`: the scheduler's engine without a GPU. A step's rows belong to any requests, over any contexts."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig, SketchConfig
from csattn.cpu.compile_together import compile_together
from csattn.cpu.heap import trim_heap
from csattn.cpu.tape import help_run
from csattn.cpu.team import Team
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.search import SearchPool
from csattn.search.run import REST_STAGE, SKETCH_STAGES
from csattn.search.work import help_search
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, resolve_rest, selector_for
from csattn.sketch.own import Growth
from offload.budget import host_memory_bytes
from offload.codecs.formats import KvFormat
from workers.engine.checks import loaded_context, require_new_context, require_rows_suffice, require_watch
from workers.engine.cpu.attend_in_place import AttendInPlace
from workers.engine.cpu.context import CpuContext, CpuRequest, HostBudget, no_context, open_context
from workers.engine.cpu.observers import Observers
from workers.engine.cpu.pool_searcher import PoolSearcher
from workers.engine.cpu.preparation import Preparation
from workers.engine.cpu.row_by_row import RowByRow
from workers.engine.cpu.row_plan import RowPlan, RowPlans
from workers.engine.fidelity import Observer
from workers.engine.model_choice import (
    SELECTOR,
    model_selects_rows,
    require_model_choice,
    require_plain_rows,
    rows_read,
)
from workers.engine.open_requests import OpenRequests
from workers.engine.own_segments import OWN_SKETCH, OwnSegments, grows_without_context
from workers.model.cpu.cpu_model import CpuModel
from workers.searchers.worker_searcher import WorkerSearcher
from workers.serving.step_engine import NO_CONTEXT, EngineCounts, Fidelity, Reading, StepEngine, StepResult, StepRow

# Every step reads the near rows from memory, as it does the weights, so few rows should stay near: segments are shorter
# than on a GPU, where the transforms of that many segments would take too much memory.
GROWTH = Growth(segment_len=512)
QUESTION_ROWS = 64  # of a step; a question alone takes a third longer with 16, and as long with 128


class CpuEngine(StepEngine):
    """The `StepEngine` of the CPU. A row's results have the same bits alone or beside others, on any number of threads.

    Over a sketch, a request's own rows become segments with sketches of their own (`csattn.sketch.own`). With another
    `rest` than the sketch's, and in full attention, all own rows are attended to. Otherwise, own rows that have left
    the request's window, which is as long as the context's, are chosen by its selector, or join its lists.
    """

    draws = False

    def __init__(
        self,
        loaded: LoadedModel,  # on the CPU; its weights are read in place
        *,
        max_rows: int | None = None,  # of a step; default: QUESTION_ROWS, but no more rows than stay near
        max_requests: int = 16,
        tail_capacity: int | None = None,  # own rows of a request; default: what positions and memory allow
        growth: Growth | None = None,
        num_threads: int | None = None,  # default: all cores
        searcher: WorkerSearcher | None = None,  # closed with the engine; default: threads of this process
        kv_format: KvFormat | None = None,  # of contexts' rows; None: read in place from the artifacts' memory maps
        host_budget: HostBudget | None = None,  # for contexts that do not fit into memory; not with kv_format
    ) -> None:
        self._growth = growth or GROWTH
        max_rows = min(QUESTION_ROWS, self._growth.least_near) if max_rows is None else max_rows
        if min(max_rows, max_requests, tail_capacity or 1) < 1:
            raise ConfigError(
                f"an engine needs at least one row, one request and one row in a tail, got {max_rows}, {max_requests} "
                f"and {tail_capacity}"
            )
        if max_rows > self._growth.least_near:
            raise ConfigError(f"a step has up to {self._growth.least_near} rows, got {max_rows}; leave out some")
        for what, value in (("a KV codec", kv_format), ("a host budget", host_budget)):
            if value is not None:
                require_plain_rows(describe(loaded.model.config), what)
        threads = num_threads or available_cpus()
        self.loaded = loaded
        self.max_rows = self.alike_rows = max_rows
        self.max_requests = max_requests
        self.max_positions, self.num_layers = loaded.geometry.max_positions, len(loaded.geometry.indexed_layers)
        self.tail_capacity = min(tail_capacity or _most_tokens(loaded, max_requests), self.max_positions)
        self._kv_format, self._host_budget = kv_format, host_budget
        self._model = CpuModel(loaded.model, max_rows, max_requests, self.tail_capacity, threads)
        self._scale = self._model.spec.softmax_scale
        indexed = [self._model.spec.layers[layer_idx] for layer_idx in self._model.spec.indexed_layers]
        self._cap = indexed[0].attention.logit_cap if indexed else None
        self._attention = AttendInPlace(self._model, self._scale)
        self._compile()
        self._team = Team(threads)
        self._searcher: PoolSearcher | WorkerSearcher = searcher if searcher is not None else PoolSearcher(self._team)
        # searches requests' own rows, in their lists or segments; requests hold this function, and not the engine
        self._own_pool = cache(partial(SearchPool, self._team))
        self._contexts: dict[int, CpuContext] = {}
        self._no_context = no_context(loaded.geometry, loaded.dtype)
        self.requests = OpenRequests[CpuRequest](
            max_requests=max_requests,
            max_rows=max_rows,
            tail_capacity=self.tail_capacity,
            max_positions=self.max_positions,
            vocab_size=loaded.geometry.vocab_size,
        )
        self._plans = RowPlans(self._model, self._scale)
        self._plan: RowPlan | None = None  # of the last step
        self._preparing = Lock()  # one preparation at a time
        self._segment_executor = ThreadPoolExecutor(1, "own-segments")
        self._search_s = self._attend_s = 0.0

    def _compile(self) -> None:
        """Compile what steps run, unless a cache has it."""
        tapes = [*self._model.tapes, *(tape for tape in self._attention.layers if tape is not None)]
        searches = () if model_selects_rows(self._model.spec) else (*SKETCH_STAGES, *REST_STAGE, help_search)
        compile_together(
            [*(stage for tape in tapes for stage in tape.functions), help_run, *searches], available_cpus()
        )

    def __repr__(self) -> str:
        return f"<CpuEngine {self.loaded.name}: {len(self._contexts)} contexts, {len(self.requests)} requests>"

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        artifact.require_model(self.loaded.fingerprint, self.loaded.geometry, self.loaded.tokenizer_hash)
        require_new_context(context_id, self._contexts, artifact, self.max_positions)
        if artifact.spec.kv_dtype != self._model.dtype_name:
            raise ConfigError(
                f"the artifact's KV is {artifact.spec.kv_dtype}, the model is loaded in {self._model.dtype_name}; "
                f"load it in {artifact.spec.kv_dtype}"
            )
        context = open_context(artifact, self._kv_format, self._host_budget)
        try:
            self._searcher.load(context_id, artifact)
        except BaseException:
            context.store.close()
            raise
        self._contexts[context_id] = context

    def remove_context(self, context_id: int) -> None:
        context = self.context(context_id)
        self.requests.require_unused(context_id)
        self._forget_plans()
        self._searcher.unload(context_id)
        del self._contexts[context_id]
        context.store.close()
        trim_heap()

    def preparation(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Callable[[], None] | None:
        """Return what another selector than csattn, or `rest` moments, first computes from all rows of the context."""
        wanted = self._wanted(context_id, config, selector)
        return None if wanted.is_made else partial(self._make, wanted)

    def open(self, request_slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        wanted = self._wanted(context_id, config, selector)
        self.requests.require_free(request_slot)
        self._make(wanted)
        self._model.begin_request(request_slot, wanted.context.states)
        if self._attention.compressed is not None:
            context = wanted.context
            self._attention.compressed.begin_request(request_slot, context.compressed, context.context_len)
        own, num_q_heads = self._own_segments(request_slot, config, wanted.own_sketch), self.loaded.geometry.num_q_heads
        self.requests[request_slot] = wanted.begin(request_slot, num_q_heads, self._own_pool, own)
        self._forget_plans()

    def write_rows(self, request_slot: int, rows: Tensor) -> None:
        request, num_rows = self.requests[request_slot], rows.shape[2]
        require_rows_suffice(request.search_period)
        self.requests.require_room(request_slot, num_rows)
        self._model.whole_tails[:, request_slot, :, request.tail_len : request.tail_len + num_rows] = rows
        request.tail_len += num_rows
        if request.own is not None:
            request.own.grow(request.tail_len)

    def read_rows(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        assert 0 <= start < stop <= self.requests[request_slot].tail_len, f"rows {start} to {stop} are not all there"
        rows = self._model.whole_tails[:, request_slot, :, start:stop].clone(memory_format=torch.contiguous_format)
        return lambda: rows

    def observe(self, request_slot: int, observer: Observer) -> None:
        """Call the observer after each layer of every later step of the request."""
        request = self.requests[request_slot]
        require_plain_rows(self._model.spec, "a record of what is attended to")
        request.observer = observer

    def close_request(self, request_slot: int) -> None:
        if (own := self.requests[request_slot].own) is not None:
            own.close()
        del self.requests[request_slot]
        self._forget_plans()

    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        """Run one step. A row sees all earlier rows of its request, also those of this step.

        If this raises, no request has changed, and the same rows can be run again.
        """
        lens = np.array(self.requests.seen_lens(rows), np.int64)
        require_watch(watch, len(rows), self.num_layers)
        request_slots = [row.request_slot for row in rows]
        for request in map(self.requests.__getitem__, set(request_slots)):
            if request.own is not None:  # not after the step: some of its rows may be drafts, and be dropped
                request.own.grow(request.tail_len)
        plan = self._plans.plan([self.requests[request_slot] for request_slot in request_slots], lens)
        if plan is not self._plan:
            self._plan = None  # if set_plan fails halfway, it leaves a mixture of both plans
            self._attention.set_plan(plan)
            self._plan = plan
        model, order = self._model, plan.order
        tail_lens = lens[order]
        positions = (plan.context_lens + tail_lens - 1).tolist()
        model.set_rows([rows[i].token_id for i in order], positions, plan.request_slots, tail_lens.tolist())
        self._attention.set_lens(plan, tail_lens)
        row_by_row = RowByRow(model, plan, tail_lens, self._scale)
        observers = Observers(model, plan, row_by_row, tail_lens, watch)
        token_rows = [row for row, of_row in enumerate(rows) if of_row.wants_token]
        try:
            self._run(plan, row_by_row, observers)
            if token_rows:
                self._team.run(model.logits_tape(np.argsort(order)[token_rows].tolist()))
        except BaseException:
            row_by_row.abandon()
            raise
        plan.commit()
        row_by_row.commit()
        model.commit(request_slots)
        self._count(plan, row_by_row, tail_lens, [rows[i].is_draft for i in order])
        return self._result(token_rows, len(rows), want_logits, observers.fidelity)

    def takes_drafts(self, artifact: Artifact | None, config: SearchConfig, selector: SelectorName) -> bool:
        is_sketch = artifact is None or artifact.spec.index_config.layout == "sketch"
        chooses_alike = selector == "full" or (selector == "csattn" and is_sketch and config.search_period == 1)
        return chooses_alike and self.loaded.geometry.kinds.isdisjoint({"state", "compressed"})

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        self.requests[request_slot].drop(num_rows)

    def context(self, context_id: int) -> CpuContext:
        """Return the context loaded under that number. Raises ConfigError if there is none."""
        return self._no_context if context_id == NO_CONTEXT else loaded_context(context_id, self._contexts)

    def reading(self, request_slot: int) -> Reading:
        request, spec = self.requests[request_slot], self._model.spec
        if model_selects_rows(spec):
            return Reading(SELECTOR, rows_read(spec, request.view.context_len, request.tail_len))
        return Reading(request.selector, request.rows_read(self.num_layers))

    def counts(self) -> EngineCounts:
        contexts = self._contexts.values()
        return EngineCounts(
            search_s=self._search_s,
            attend_s=self._attend_s,
            kv_bytes=sum(context.kv_bytes for context in contexts),
            index_bytes=sum(context.artifact.index_bytes for context in contexts if context.artifact is not None),
        )

    def close(self) -> None:
        """Stop the threads and close the contexts. No step may be running."""
        for request_slot in list(self.requests):
            self.close_request(request_slot)
        self._segment_executor.shutdown(cancel_futures=True)
        self._team.close()
        self._searcher.close()
        for context in self._contexts.values():
            context.store.close()
        self._contexts.clear()  # their files stay mapped while anything references them

    def _run(self, plan: RowPlan, row_by_row: RowByRow, observers: Observers) -> None:
        """Run all layers. With lookahead, a layer's searches run while the layer before it is computed."""
        model = self._model
        self._team.run(model.begin[plan.ahead])
        under_way, indexed = False, model.indexed_idx
        try:
            for layer_idx, (indexed_idx, following) in enumerate(zip(indexed, [*indexed[1:], None], strict=True)):
                started, own_searches = time.perf_counter(), []
                if indexed_idx is not None:
                    if under_way:
                        under_way = False
                        self._searcher.finish()
                    if late := plan.late(indexed_idx):
                        self._searcher.start(indexed_idx, late)
                        self._searcher.finish()
                if following is not None and (early := plan.early(following)):
                    under_way = True
                    self._searcher.start(following, early)
                if indexed_idx is not None:
                    if own_searches := plan.own_searches(indexed_idx):
                        self._own_pool().search_layers(own_searches)
                    row_by_row.choose(indexed_idx)
                attending = time.perf_counter()
                if (attend := self._attention.layers[layer_idx]) is not None:
                    self._team.run(attend)
                if self._attention.compressed is not None:
                    self._attention.compressed.attend(layer_idx)
                if indexed_idx is not None:
                    plan.keep(indexed_idx)
                    row_by_row.attend(indexed_idx)
                if plan.groups or own_searches or row_by_row.choosing:
                    self._search_s += attending - started
                self._attend_s += time.perf_counter() - attending
                if indexed_idx is not None:
                    observers.show(indexed_idx)
                if under_way and len(row_by_row):  # rows to gather are read while the rest of the layer is computed
                    under_way = False
                    self._searcher.finish()
                    assert following is not None
                    row_by_row.prefetch(following)
                self._team.run(model.after[plan.ahead][layer_idx])
        except BaseException:
            if under_way:
                with suppress(Exception):  # the first error is the one to report
                    self._searcher.finish()
            raise

    def _count(self, plan: RowPlan, row_by_row: RowByRow, tail_lens: NDArray[np.int64], is_draft: list[bool]) -> None:
        """Add the rows to their requests, with what each has read. tail_lens, is_draft: in the plan's order."""
        counts = plan.counts(tail_lens, self.num_layers)
        for row, more in row_by_row.counts.items():
            counts[row].add(more)
        for row in np.argsort(tail_lens).tolist():  # so that a request's rows are in order
            plan.requests[row].add_row(int(tail_lens[row]), counts[row], is_draft[row])

    def _forget_plans(self) -> None:
        """Drop all plans, which reference requests and their contexts."""
        self._plans.forget()
        self._plan = None

    def _wanted(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Preparation:
        """Return what such a request needs. Raises ConfigError for what this engine cannot do."""
        context = self.context(context_id)
        view = ContextView(context.context_len, self._scale, config, self._cap)
        require_model_choice(self._model.spec, config, selector)
        if context.artifact is None or not context.kv:  # there are no rows to choose from, or the model itself chooses
            may_grow = bool(context.kv) and selector == "csattn" and config.keep < 1 and self._cap is None
            own_sketch = OWN_SKETCH if may_grow and grows_without_context(config) else None
            return Preparation(context_id, context, view, "full", "none", own_sketch)
        name = selector_for(selector, view)
        if self._host_budget is not None:
            self._host_budget.require_alike(name, view)
        index_config = context.artifact.spec.index_config
        rest = resolve_rest(config, name, index_config.layout, self._cap is not None)
        own_sketch = index_config if isinstance(index_config, SketchConfig) and rest == "sketch" else None
        return Preparation(context_id, context, view, name, rest, own_sketch if name == "csattn" else None)

    def _make(self, wanted: Preparation) -> None:
        """Make it unless it is made: the check is outside the lock, so as not to wait for another context's."""
        if not wanted.is_made:
            with self._preparing:
                wanted.make(self.loaded)

    def _own_segments(self, request_slot: int, config: SearchConfig, sketch: SketchConfig | None) -> OwnSegments | None:
        """Return the segments of a new request; None if its own rows are not coded."""
        if sketch is None:
            return None
        tails = self._model.indexed_tails[:, request_slot]

        def rows(start: int, stop: int) -> Iterator[Tensor]:
            return (tail[:, start:stop] for tail in tails)

        return OwnSegments(request_slot, len(tails), rows, config, sketch, self._growth, self._segment_executor)

    def _result(self, token_rows: list[int], num_rows: int, want_logits: bool, seen: Fidelity | None) -> StepResult:
        """Move logits to the places of their rows. token_rows: those whose logits the model has computed, in order."""
        logits, next_ids = self._model.logits[:num_rows], np.full(num_rows, -1)
        for place, row in reversed([*enumerate(token_rows)]):  # backwards, because place <= row: nothing is overwritten
            argmax = logits[place].argmax()
            next_ids[row] = argmax if np.isfinite(logits[place, argmax]) else -1
            if want_logits and place != row:
                logits[row] = logits[place]
        return StepResult(next_ids, logits if want_logits else None, seen)


def _most_tokens(loaded: LoadedModel, max_requests: int) -> int:
    """Return how many own rows of each request half of the host memory holds. Rows that are not used take no memory."""
    geometry = loaded.geometry
    row_bytes = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * loaded.dtype.itemsize
    return max(1, min(geometry.max_positions, host_memory_bytes() // 2 // (max_requests * row_bytes)))
