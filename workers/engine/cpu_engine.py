"""Steps on the CPU of rows that belong to any requests, over any contexts: the engine of machines without a GPU."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from threading import Lock
from typing import Self

import numpy as np
import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig, SketchConfig
from csattn.cpu.heap import trim_heap
from csattn.cpu.team import Team
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.families import describe
from csattn.search import SearchPool
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, resolve_rest, selector_for
from csattn.sketch.own import Growth
from offload.budget import host_memory_bytes
from offload.codecs.formats import KvFormat
from workers.engine.cpu_context import CpuContext, CpuRequest, HostBudget, no_context, open_context
from workers.engine.fidelity import Observer
from workers.engine.looks import Looks
from workers.engine.on_cpu import AttendOnCpu
from workers.engine.own_choice import SELECTOR, chooses_itself, require_own_choice, require_plain_rows, rows_read
from workers.engine.own_segments import OF_OWN, OwnSegments, grows_alone
from workers.engine.plain_rows import PlainRows
from workers.engine.pool_searcher import PoolSearcher
from workers.engine.preparation import Preparation
from workers.engine.row_plan import RowPlan, RowPlans
from workers.engine.slots import (
    loaded_context,
    open_request,
    require_free_slot,
    require_new_context,
    require_num_rows,
    require_room,
    require_unused,
    require_watch,
    seen_lens,
)
from workers.model.cpu.cpu_model import CpuModel
from workers.model.rows import require_tokens
from workers.searchers.worker_searcher import WorkerSearcher
from workers.serving.step_engine import NO_CONTEXT, EngineCounts, Fidelity, Reading, StepResult, StepRow

# Near rows are read from memory, as weights are, so few of them stay: segments are shorter than on a GPU, whose memory
# their transforms would take.
GROWTH = Growth(segment_len=512)
QUESTION_ROWS = 64  # of a step: of a question alone 16 take a third longer, 128 as long


class CpuEngine:
    """A `StepEngine`. A row's results are the same bits alone and among others, on any number of threads.

    Over a sketch, a request's own rows become segments of its own (`csattn.sketch.own`); with another rest than the
    sketch's, and in full attention, all of them are attended to. Otherwise those that have left its window, as long as
    the context's, are its selector's to choose, or join its lists.
    """

    draws = False

    def __init__(
        self,
        loaded: LoadedModel,  # on the CPU; its weights are read in place
        *,
        max_rows: int | None = None,  # of a step; QUESTION_ROWS unless said, or as many as stay near
        num_slots: int = 16,
        tail_capacity: int | None = None,  # up to the model's last position, as far as there is memory, unless said
        growth: Growth | None = None,
        num_threads: int | None = None,  # all cores unless said
        searcher: WorkerSearcher | None = None,  # closed with the engine; threads of this process unless given
        kv_format: KvFormat | None = None,  # of contexts' rows; None: they are read where their artifacts map them
        host_budget: HostBudget | None = None,  # or where they do not fit into memory
    ) -> None:
        self._growth = growth or GROWTH
        max_rows = min(QUESTION_ROWS, self._growth.least_near) if max_rows is None else max_rows
        if min(max_rows, num_slots, tail_capacity or 1) < 1:
            raise ConfigError(
                f"an engine needs at least one row, one slot and one row in a tail, got {max_rows}, {num_slots} and "
                f"{tail_capacity}"
            )
        if max_rows > self._growth.least_near:
            raise ConfigError(f"a step has up to {self._growth.least_near} rows, got {max_rows}; leave out some")
        for what, is_asked in (("a KV codec", kv_format), ("a host budget", host_budget)):
            if is_asked is not None:
                require_plain_rows(describe(loaded.model.config), what)
        threads = num_threads or available_cpus()
        self.loaded = loaded
        self.max_rows, self.num_slots = max_rows, num_slots
        self.max_positions, self.num_layers = loaded.geometry.max_positions, len(loaded.geometry.indexed_layers)
        self.tail_capacity = min(tail_capacity or _most_tokens(loaded, num_slots), self.max_positions)
        self._kv_format, self._host_budget = kv_format, host_budget
        self._model = CpuModel(loaded.model, max_rows, num_slots, self.tail_capacity, threads)
        self._scale = self._model.shape.softmax_scale
        indexed = [self._model.shape.layers[layer_idx] for layer_idx in self._model.shape.indexed_layers]
        self._cap = indexed[0].attention.logit_cap if indexed else None
        self._attention = AttendOnCpu(self._model, self._scale)
        self._team = Team(threads)
        self._searcher: PoolSearcher | WorkerSearcher = searcher if searcher is not None else PoolSearcher(self._team)
        # of searches of a request's own rows: in its lists, or in its segments; requests have it, and not their engine
        self._own_pool = cache(partial(SearchPool, self._team))
        self._contexts: dict[int, CpuContext] = {}
        self._no_context = no_context(loaded.geometry, loaded.dtype)
        self._requests: dict[int, CpuRequest] = {}
        self._plans = RowPlans(self._model, self._scale)
        self._plan: RowPlan | None = None  # of the last step
        self._making = Lock()  # one preparation at a time
        self._beside = ThreadPoolExecutor(1, "own-segments")
        self._search_s = self._attend_s = 0.0

    def __repr__(self) -> str:
        return f"<CpuEngine {self.loaded.name}: {len(self._contexts)} contexts, {len(self._requests)} requests>"

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        artifact.require_model(self.loaded.fingerprint, self.loaded.geometry)
        artifact.require_tokenizer(self.loaded.tokenizer_hash)
        require_new_context(context_id, self._contexts, artifact, self.max_positions)
        if artifact.spec.kv_dtype != self._model.kind:
            raise ConfigError(
                f"the artifact's KV is {artifact.spec.kv_dtype}, the model is loaded in {self._model.kind}; "
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
        require_unused(context_id, {slot: request.context_id for slot, request in self._requests.items()})
        self._forget_plans()
        self._searcher.unload(context_id)
        del self._contexts[context_id]
        context.store.close()
        trim_heap()

    def preparation(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Callable[[], None] | None:
        """Another selector than csattn, or an estimate by moments, makes something of all of the context's rows."""
        wanted = self._wanted(context_id, config, selector)
        return None if wanted.is_made else partial(self._make, wanted)

    def open(self, slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        wanted = self._wanted(context_id, config, selector)
        require_free_slot(slot, self.num_slots, self._requests)
        self._make(wanted)
        self._model.begin_request(slot, wanted.context.states)
        if self._attention.compressed is not None:
            context = wanted.context
            self._attention.compressed.begin_request(slot, context.compressed, context.context_len)
        tails = self._model.indexed_tails[:, slot]

        def own_segments(of_own: SketchConfig) -> OwnSegments:
            def rows(start: int, stop: int) -> Iterator[Tensor]:
                return (tail[:, start:stop] for tail in tails)

            return OwnSegments(slot, len(tails), rows, config, of_own, self._growth, self._beside)

        num_q_heads = self.loaded.geometry.num_q_heads
        self._requests[slot] = wanted.begin(slot, num_q_heads, self._own_pool, own_segments)
        self._forget_plans()

    def write_rows(self, slot: int, rows: Tensor) -> None:
        request, num_rows = self.request(slot), rows.shape[2]
        self._require_room(slot, num_rows)
        self._model.whole_tails[:, slot, :, request.tail_len : request.tail_len + num_rows] = rows
        request.tail_len += num_rows
        if request.own is not None:
            request.own.grow(request.tail_len)

    def read_rows(self, slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        assert 0 <= start < stop <= self.request(slot).tail_len, f"rows {start} to {stop} are not all there"
        rows = self._model.whole_tails[:, slot, :, start:stop].clone(memory_format=torch.contiguous_format)
        return lambda: rows

    def observe(self, slot: int, observer: Observer) -> None:
        """From now on, that sees every step of the request, layer by layer."""
        request = self.request(slot)
        require_plain_rows(self._model.shape, "a record of what is attended to")
        request.observer = observer

    def close_slot(self, slot: int) -> None:
        if (own := self.request(slot).own) is not None:
            own.close()
        del self._requests[slot]
        self._forget_plans()

    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        """Rows see what stands before them, in this step too. If this raises, no request has moved on.

        The rows of a step that has failed can be run again.
        """
        self._require_rows(rows, watch)
        slots = [row.slot for row in rows]
        lens = np.array(seen_lens(slots, {slot: self._requests[slot].tail_len for slot in slots}), np.int64)
        plan = self._plans.plan([self._requests[slot] for slot in slots], lens)
        if plan is not self._plan:
            self._plan = None  # what fails halfway leaves a mixture of both
            self._attention.set_plan(plan)
            self._plan = plan
        model, order = self._model, plan.order
        tail_lens = lens[order]
        positions = [
            request.view.context_len + length - 1 for request, length in zip(plan.requests, tail_lens, strict=True)
        ]
        model.set_rows(
            [rows[i].token_id for i in order], positions, [r.slot for r in plan.requests], tail_lens.tolist()
        )
        self._attention.set_lens(plan, tail_lens)
        plain = PlainRows(model, plan, tail_lens, self._scale)
        looks = Looks(model, plan, plain, tail_lens, watch)
        asking = [row for row, of_row in enumerate(rows) if of_row.asks]
        try:
            self._run(plan, plain, looks)
            if asking:
                self._team.run(model.logits_tape(np.argsort(order)[asking].tolist()))
        except BaseException:
            plain.abandon()
            raise
        plan.commit()
        plain.commit()
        model.commit(slots)
        plan.count(tail_lens, self.num_layers)
        for slot, length in zip(slots, lens.tolist(), strict=True):
            self._requests[slot].tail_len = length
        for request in map(self._requests.__getitem__, set(slots)):
            if request.own is not None:
                request.own.grow(request.tail_len)
        return self._result(asking, len(rows), want_logits, looks.fidelity)

    def context(self, context_id: int) -> CpuContext:
        """The context that is loaded under that number."""
        return self._no_context if context_id == NO_CONTEXT else loaded_context(context_id, self._contexts)

    def request(self, slot: int) -> CpuRequest:
        """The request that is open there."""
        return open_request(slot, self._requests)

    def reading(self, slot: int) -> Reading:
        request, shape = self.request(slot), self._model.shape
        if chooses_itself(shape):
            return Reading(SELECTOR, rows_read(shape, request.view.context_len, request.tail_len))
        read = request.count.far_rows + request.count.near_rows
        return Reading(request.selector, read / max(1, request.tail_len * self.num_layers))

    def counts(self) -> EngineCounts:
        contexts = self._contexts.values()
        return EngineCounts(
            search_s=self._search_s,
            attend_s=self._attend_s,
            kv_bytes=sum(context.kv_bytes for context in contexts),
            index_bytes=sum(context.artifact.index_bytes for context in contexts if context.artifact is not None),
        )

    def close(self) -> None:
        """Let the threads go. No step may be under way."""
        for request in self._requests.values():
            if request.own is not None:
                request.own.close()
        self._beside.shutdown(cancel_futures=True)
        self._team.close()
        self._searcher.close()
        for context in self._contexts.values():
            context.store.close()
        self._contexts.clear()  # whose files are mapped as long as anything holds them
        self._forget_plans()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, plan: RowPlan, plain: PlainRows, looks: Looks) -> None:
        """All layers. Searches run while the layer before is computed."""
        model = self._model
        self._team.run(model.begin[plan.ahead])
        under_way, numbers = False, model.numbers
        try:
            for layer_idx, (number, following) in enumerate(zip(numbers, [*numbers[1:], None], strict=True)):
                started = time.perf_counter()
                if number is not None and under_way:
                    under_way = False
                    self._searcher.finish()
                if number is not None and (late := plan.late(number)):
                    self._searcher.start(number, late)
                    self._searcher.finish()
                if following is not None and (early := plan.early(following)):
                    under_way = True
                    self._searcher.start(following, early)
                own_searches = [] if number is None else plan.own_searches(number)
                if own_searches:
                    self._own_pool().search_layers(own_searches)
                if number is not None:
                    plain.choose(number)
                attending = time.perf_counter()
                if (attend := self._attention.layers[layer_idx]) is not None:
                    self._team.run(attend)
                if self._attention.compressed is not None:
                    self._attention.compressed.attend(layer_idx)
                if number is not None:
                    plan.keep(number)
                    plain.attend(number)
                if plan.groups or own_searches or plain.num_choosing:
                    self._search_s += attending - started
                self._attend_s += time.perf_counter() - attending
                if number is not None:
                    looks.look(number)
                if under_way and len(plain):  # rows to gather are read while the rest of the layer is computed
                    under_way = False
                    self._searcher.finish()
                    assert following is not None
                    plain.prefetch(following)
                self._team.run(model.after[plan.ahead][layer_idx])
        except BaseException:
            if under_way:
                with suppress(Exception):  # the first error is the one to tell
                    self._searcher.finish()
            raise

    def _forget_plans(self) -> None:
        """They hold on to requests and their contexts."""
        self._plans.forget()
        self._plan = None

    def _wanted(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Preparation:
        """Raises ConfigError for what this engine cannot do."""
        context = self.context(context_id)
        view = ContextView(context.context_len, self._scale, config, self._cap)
        require_own_choice(self._model.shape, config, selector)
        if context.artifact is None or not context.kv:  # there is nothing to choose from, or the model does
            may_grow = bool(context.kv) and selector == "csattn" and config.keep < 1 and self._cap is None
            of_own = OF_OWN if may_grow and grows_alone(config) else None
            return Preparation(context_id, context, view, "full", "none", of_own)
        name = selector_for(selector, view)
        if self._host_budget is not None:
            self._host_budget.require_alike(name, view)
        index_config = context.artifact.spec.index_config
        rest = resolve_rest(config, name, index_config.layout, self._cap is not None)
        of_own = index_config if isinstance(index_config, SketchConfig) and rest == "sketch" else None
        return Preparation(context_id, context, view, name, rest, of_own if name == "csattn" else None)

    def _make(self, wanted: Preparation) -> None:
        """Unless it is made: then nobody waits for what another context is prepared for."""
        if not wanted.is_made:
            with self._making:
                wanted.make(self.loaded)

    def _result(self, asking: list[int], num_rows: int, want_logits: bool, seen: Fidelity | None) -> StepResult:
        """asking: the rows whose logits the model has, one behind the other."""
        logits, next_ids = self._model.logits[:num_rows], np.full(num_rows, -1)
        for place, row in reversed([*enumerate(asking)]):  # from the last on, as each lies in its place or before it
            likeliest = logits[place].argmax()
            next_ids[row] = likeliest if np.isfinite(logits[place, likeliest]) else -1
            if want_logits and place != row:
                logits[row] = logits[place]
        return StepResult(next_ids, logits if want_logits else None, seen)

    def _require_rows(self, rows: Sequence[StepRow], watch: tuple[int, int] | None) -> None:
        """Raise before anything changes."""
        require_num_rows(len(rows), self.max_rows)
        require_tokens([row.token_id for row in rows], self.loaded.geometry.vocab_size)
        for slot, num_new in Counter(row.slot for row in rows).items():
            self._require_room(slot, num_new)
        require_watch(watch, len(rows), self.num_layers)

    def _require_room(self, slot: int, num_new: int) -> None:
        request = self.request(slot)
        room = min(self.tail_capacity, self.max_positions - request.view.context_len)
        require_room(slot, request.tail_len + num_new, room)


def _most_tokens(loaded: LoadedModel, num_slots: int) -> int:
    """Of each request's own, as far as half of the memory holds them. What is not used takes none."""
    geometry = loaded.geometry
    row_bytes = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * loaded.dtype.itemsize
    return max(1, min(geometry.max_positions, host_memory_bytes() // 2 // (num_slots * row_bytes)))
