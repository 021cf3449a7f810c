"""`GpuEngine`: the scheduler's engine on a GPU. A step's rows belong to any requests, over any contexts."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.batch import DeviceSelection
from csattn.config import (
    IndexConfig,
    SearchConfig,
    SketchConfig,
    preset,
)
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.search import SearchPool
from csattn.selection import Selection, join_choices
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView
from csattn.sketch.own import Growth, own_top_k
from offload.codecs.formats import KvFormat
from workers.engine.checks import loaded_context, require_new_context, require_rows_suffice, require_watch
from workers.engine.fidelity import Seen, fidelity
from workers.engine.gpu.draws import DrawsOnDevice
from workers.engine.gpu.memory import Placement, placement_named, require_heads
from workers.engine.gpu.on_host import StepSearcher
from workers.engine.gpu.own_on_device import LAYERS_AT_ONCE, join_on_device, place_segment
from workers.engine.gpu.placed_model import Progress
from workers.engine.gpu.placing import Placing
from workers.engine.gpu.sizing import Sizing
from workers.engine.gpu.sparse_or_full import all_are_faster
from workers.engine.gpu.step_model import StepModel, step_model
from workers.engine.gpu.step_results import LogitsOnHost, joined, kept
from workers.engine.gpu.stream_thread import one_step_at_a_time, stream_thread, synchronize_stream
from workers.engine.model_choice import (
    SELECTOR,
    model_selects_rows,
    require_choice_placed,
    require_model_choice,
    require_plain_rows,
    rows_read,
)
from workers.engine.open_requests import OpenRequest, OpenRequests, StepCount
from workers.engine.own_segments import OwnSegments, grows_without_context
from workers.model.devices import require_device
from workers.model.ops import ALIKE_ROWS, QUANTIZED_ROWS
from workers.model.runner import StepOutput
from workers.searchers.step_searches import StepSearches
from workers.serving.step_engine import NO_CONTEXT, EngineCounts, Fidelity, Reading, StepEngine, StepResult, StepRow

BATCH_SIZES = (1, 8, 16)  # for a single request: its decode steps, those with drafts, and its question
MAX_ROWS = 64  # of a step
_MOST_THREADS = 8  # that compute the eigenvectors for a segment of own rows
GPU_SELECTORS: tuple[SelectorName, ...] = ("csattn", "full", "exact")
SLOT_SHARE = 0.15  # of a context's rows that have cache slots on the device, where its KV is on the host


@dataclass(slots=True, kw_only=True)
class _Request(OpenRequest):
    placed_id: int  # the context's id in `PlacedModel`; -1 for no context
    config: SearchConfig
    own: OwnSegments | None  # None: all of its own rows are attended to
    num_segments: int = 0  # own segments in use
    is_written: bool = False  # rows from `write_rows` are still being copied to its tail

    def segments_for(self, tail_len: int) -> int:
        """Return how many own segments a row reads that sees tail_len rows of the tail."""
        return self.own.num_segments(tail_len) if self.own is not None else 0


class GpuEngine(StepEngine):
    """The `StepEngine` of a GPU, in one placement.

    Memory is planned, and steps are captured as CUDA graphs, when the first request or context arrives: see `Placing`.

    All requests select with the engine's configuration, or with a smaller `keep`; or all attend to all rows. With
    all_where_faster, some steps attend to all rows. Apart from that, a row's results have the same bits alone and
    beside others in steps of up to 16 rows, or 8 with weights of 8 or 4 bits; in larger steps, and over latents, the
    last bits may differ.
    """

    draws = True

    def __init__(
        self,
        loaded: LoadedModel | StepModel,
        config: SearchConfig,
        placement: Placement | str,
        *,
        batch_sizes: tuple[int, ...] = BATCH_SIZES,  # of steps, ascending; a step is padded with idle rows
        max_requests: int = 1,
        tail_capacity: int | None = None,  # own rows of a request; default: what fits in memory
        own_on_host: bool | None = None,  # move the first own rows to the host; default: if more rows fit so
        all_where_faster: bool = False,  # attend to all rows in steps where that is faster; placement device only
        growth: Growth | None = None,
        num_contexts: int = 1,  # loaded at the same time
        max_context_len: int | None = None,  # rows; default: what the model's positions and the memory allow
        index_config: IndexConfig | None = None,  # of contexts; default: the first one's, or preset `default`
        slot_share: float = SLOT_SHARE,
        selector: SelectorName = "csattn",  # of all requests: csattn, full, or in placement device exact
        kv_format: KvFormat | None = None,  # of contexts' rows, on the device and in host memory; None: as built
        num_threads: int | None = None,  # search threads in placement `host`; default: all cores
        searcher: StepSearcher | None = None,  # in placement `host`, instead of threads; closed with the engine
        device: torch.device | None = None,
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        """Raises NoDeviceError without a GPU, and ConfigError for settings that do not go together."""
        self.model = loaded if isinstance(loaded, StepModel) else step_model(loaded)
        self.config, self.placement, spec = config, placement_named(placement), self.model.spec
        self.selector = selector
        require_choice_placed(spec, self.placement)
        require_heads(spec, self.model.dtype)
        require_device()
        require_selector(selector, self.placement, kv_format)
        require_model_choice(spec, config, selector)
        if kv_format is not None:
            require_plain_rows(spec, "a KV codec")
        self.batch_sizes, self.max_rows, self.max_requests = batch_sizes, batch_sizes[-1], max_requests
        self.alike_rows = min(self.max_rows, QUANTIZED_ROWS if self.model.is_quantized else ALIKE_ROWS)
        self.max_positions, self.num_layers = spec.max_positions, len(spec.indexed_layers)
        self._num_contexts, self._growth = num_contexts, growth or Growth()
        self._all_where_faster = all_where_faster
        sizing = Sizing(
            model=self.model,
            placement=self.placement,
            search=config,
            selector=selector,
            batch_sizes=batch_sizes,
            num_contexts=num_contexts,
            max_context_len=max_context_len,
            num_tails=max_requests,
            tail_capacity=tail_capacity,
            own_on_host=own_on_host,
            growth=self._growth,
            slot_share=slot_share,
            kv_format=kv_format,
            all_where_faster=all_where_faster,
        )
        device = device or torch.device("cuda", 0)
        index_config = index_config or preset("default")
        if tail_capacity is None or own_on_host is None:
            sizing = sizing.settle(index_config, self.model.available(device))
        assert sizing.tail_capacity is not None
        self.tail_capacity, self.own_on_host = min(sizing.tail_capacity, self.max_positions), sizing.own_on_host
        sizing = replace(sizing, tail_capacity=self.tail_capacity)
        self._segment_executor = stream_thread(device, "own-segments")
        self._parallel = ThreadPoolExecutor(min(_MOST_THREADS, available_cpus()), "own-segments-on-cpu")
        self._searcher = searcher
        if self.placement == "host" and selector != "full" and searcher is None:
            self._searcher = StepSearches(SearchPool(num_threads or available_cpus()))
        self._placing = Placing(sizing, index_config, self._searcher, device, on_progress)
        self.placed_ids: dict[int, int] = {}  # from the scheduler's context ids to those of `PlacedModel`
        self.requests = OpenRequests[_Request](
            max_requests=max_requests,
            max_rows=self.max_rows,
            tail_capacity=self.tail_capacity,
            max_positions=self.max_positions,
            vocab_size=spec.vocab_size,
        )
        self._logits, self._draws = LogitsOnHost(self.max_rows), DrawsOnDevice(device, self.max_rows)

    def __repr__(self) -> str:
        return f"<GpuEngine {self.placement}: {len(self.placed_ids)} contexts, {len(self.requests)} requests>"

    @property
    def is_started(self) -> bool:
        """Whether memory is planned and steps are captured."""
        return self._placing.placed is not None

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        require_new_context(context_id, self.placed_ids, artifact, self.max_positions)
        artifact = self.model.open(artifact)
        placed = self._placing.start_for(artifact, self.model, is_used=bool(self.placed_ids or self.requests))
        placed_id = next(i for i in range(self._num_contexts + 1) if i not in self.placed_ids.values())
        placed.add_context(placed_id, artifact, meanwhile)
        self.placed_ids[context_id] = placed_id

    def remove_context(self, context_id: int) -> None:
        placed_id = loaded_context(context_id, self.placed_ids)
        self.requests.require_unused(context_id)
        self._placing.ready().remove_context(placed_id)
        del self.placed_ids[context_id]

    def open(self, request_slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        placed_id = -1 if context_id == NO_CONTEXT else loaded_context(context_id, self.placed_ids)
        self.requests.require_free(request_slot)
        require_model_choice(self.model.spec, config, selector)
        chooses = model_selects_rows(self.model.spec)  # then the request's configuration does not matter
        if not chooses:
            self._require_as_captured(config, selector)
        self._placing.start(self.model)
        placed = self._placing.ready()
        if not chooses and selector != "full" and placed.shape.attends_all and config.keep < 1:
            raise ConfigError(
                f"keep is {config.keep}, but over lists this engine was started to keep all rows, which is full "
                "attention; leave it out, or start another engine"
            )
        placed.own_rows.open(request_slot)
        placed.begin_request(request_slot, placed_id)
        context_len = placed.artifacts[placed_id].spec.context_len if placed_id >= 0 else 0
        own = self._own_segments(request_slot, context_id, config)
        self.requests[request_slot] = _Request(
            context_id=context_id, context_len=context_len, placed_id=placed_id, config=config, own=own
        )

    def write_rows(self, request_slot: int, rows: Tensor) -> None:
        request = self.requests[request_slot]
        require_rows_suffice(request.config.search_period)
        self.requests.require_room(request_slot, rows.shape[2])
        self._placing.ready().own_rows.write(request_slot, request.tail_len, rows)
        request.tail_len += rows.shape[2]
        request.is_written = True

    def read_rows(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        assert 0 <= start < stop <= self.requests[request_slot].tail_len, f"rows {start} to {stop} are not all there"
        self._settle_rows(request_slot)
        return self._placing.ready().own_rows.read(request_slot, start, stop)

    def close_request(self, request_slot: int) -> None:
        request, own = self.requests[request_slot], self._placing.ready().own
        if request.own is not None:
            request.own.close()
        if own is not None and request.num_segments:
            own.unload(request_slot)
        del self.requests[request_slot]

    @torch.no_grad()
    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        """Run one step. A row sees all earlier rows of its request, also those of this step.

        The step is split in two before a row that reads other own segments than its request's rows before it, and
        before a row for whose choice its context has no slots left in this step.
        """
        if watch is not None:
            require_plain_rows(self.model.spec, "a record of what is attended to")
            require_watch(watch, len(rows), self.num_layers)
        lens = self.requests.seen_lens(rows)  # checks all rows, so a step that is split runs as a whole or not at all
        for request_slot in {row.request_slot for row in rows}:
            self._settle_rows(request_slot)
            at = next(i for i, row in enumerate(rows) if row.request_slot == request_slot)
            self._grow(request_slot, lens[at], may_move=not rows[at].is_draft)
        if stop := self._split_at(rows, lens):
            first = kept(self.step(rows[:stop], want_logits, watch if watch and watch[0] < stop else None))
            late = (watch[0] - stop, watch[1]) if watch and watch[0] >= stop else None
            return joined(first, self.step(rows[stop:], want_logits, late))
        runner = self._placing.ready().runner
        batch_size = runner.batch_size_for(len(rows))
        requests = [self.requests[row.request_slot] for row in rows]
        context_lens = [request.context_len for request in requests]
        positions = [context_len + length - 1 for context_len, length in zip(context_lens, lens, strict=True)]
        placed_ids = [request.placed_id for request in requests]
        request_slots = [row.request_slot for row in rows]
        top_ks = [request.config.top_k(n) for request, n in zip(requests, context_lens, strict=True)]
        own_lens = [request.num_segments * self._growth.segment_len for request in requests]
        starts, token_ids = [*map(self._placing.ready().own_rows.start, request_slots)], [row.token_id for row in rows]
        reads_all = self._all_are_faster(placed_ids, context_lens, own_lens)
        if reads_all:
            watch = None  # there is no selection to compare
        runner.fill(
            batch_size,
            token_ids=token_ids,
            positions=positions,
            context_ids=placed_ids,
            tail_ids=request_slots,
            tail_lens=lens,
            top_ks=top_ks,
            own_lens=own_lens,
            tail_starts=starts,
            reads_all=reads_all,
        )
        seen, device = None, runner.weights.device
        with one_step_at_a_time(device):
            try:
                if watch is None:
                    output = runner.step(batch_size)
                else:
                    output, seen = self._watched_step(batch_size, rows[watch[0]].request_slot, lens[watch[0]], *watch)
            except BaseException:
                self._placing.ready().attention.abandon()
                raise
            self._draws.enqueue(rows, output)
            synchronize_stream(device)  # a copy that waits for the GPU keeps other threads out of the driver
        next_ids = output.next_ids[: len(rows)].cpu().numpy()
        logits = self._logits.take(rows, output.logits) if want_logits else None
        for row, request, length, own_len in zip(rows, requests, lens, own_lens, strict=True):
            request.add_row(length, self._read(request, length, own_len, reads_all), row.is_draft)
        for request in requests:
            if request.own is not None:
                request.own.grow(request.tail_len - len(request.drafted))
        return StepResult(next_ids, logits, seen, self._draws.likelihoods(rows, next_ids))

    def _split_at(self, rows: Sequence[StepRow], lens: Sequence[int]) -> int:
        """Return how many of the first rows have to be a step of their own; 0: all rows can run together."""
        most, of_context = self._placing.ready().far.rows_at_once or len(rows), Counter[int]()
        for i, row in enumerate(rows):
            request = self.requests[row.request_slot]
            of_context[request.context_id] += request.context_id != NO_CONTEXT
            if of_context[request.context_id] > most or request.segments_for(lens[i]) != request.num_segments:
                return i
        return 0

    def _all_are_faster(self, placed_ids: Sequence[int], context_lens: Sequence[int], own_lens: Sequence[int]) -> bool:
        shape = self._placing.ready().shape
        contexts = [(i, length) for i, length in zip(placed_ids, context_lens, strict=True) if i >= 0]
        return shape.sparse_or_full and all_are_faster(shape, contexts, own_lens)

    def _read(self, request: _Request, tail_len: int, own_len: int, reads_all: bool) -> StepCount:
        """Return what a row reads that sees tail_len rows of its tail, own_len of them in segments."""
        config, context_len, num_layers = request.config, request.context_len, self.num_layers
        near = min(context_len, config.sink_len + config.window_len)
        far = context_len - near
        if not (reads_all or self._placing.ready().shape.attends_all):
            far = min(config.top_k(context_len), far) + own_top_k(config, own_len)
            tail_len -= own_len
        return StepCount(tokens=1, far_rows=num_layers * far, near_rows=num_layers * (near + tail_len))

    def takes_drafts(self, artifact: Artifact | None, config: SearchConfig, selector: SelectorName) -> bool:
        """Return False for latents, too, where a row's last bits depend on how many rows a step has, and with
        all_where_faster: what a row reads depends on the others then."""
        keeps_rows = "state" not in self.model.geometry.kinds and not model_selects_rows(self.model.spec)
        return keeps_rows and config.search_period == 1 and not self._all_where_faster

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        self.requests[request_slot].drop(num_rows)

    def reading(self, request_slot: int) -> Reading:
        request, spec = self.requests[request_slot], self.model.spec
        if model_selects_rows(spec):
            return Reading(SELECTOR, rows_read(spec, request.context_len, request.tail_len))
        selector = "full" if self._placing.ready().shape.attends_all else self.selector
        return Reading(selector, request.rows_read(self.num_layers))

    def counts(self) -> EngineCounts:
        """Return counts and bytes. Searches and attention overlap on a GPU, so they are not timed separately."""
        placed = self._placing.placed
        if placed is None:
            return EngineCounts()
        cache, artifacts = placed.far.cache, placed.artifacts.values()
        layers = [] if cache is None else cache.statistics()
        return EngineCounts(
            slot_lookups=sum(layer.num_selected for layer in layers),
            slot_hits=sum(layer.num_found for layer in layers),
            kv_bytes=sum(placed.shape.kv_bytes(artifact.spec.context_len) for artifact in artifacts),
            index_bytes=sum(artifact.index_bytes for artifact in artifacts),
            device_bytes=torch.cuda.memory_allocated(placed.device) if torch.cuda.is_available() else 0,
        )

    def close(self) -> None:
        """Unpin host memory and stop the threads. No step may be in flight."""
        for request in self.requests.values():
            if request.own is not None:
                request.own.close()
        self._segment_executor.shutdown(cancel_futures=True)
        self._parallel.shutdown()
        try:
            self._placing.close()
        finally:
            if self._searcher is not None:
                self._searcher.close()

    def _watched_step(
        self, batch_size: int, request_slot: int, tail_len: int, row: int, number: int
    ) -> tuple[StepOutput, Fidelity | None]:
        """Run the step call by call, not as a graph, and compare one row of one layer with exact attention.

        number: of the layer among those that have an index. The fidelity is None for a request without a context.
        """
        placed, request = self._placing.ready(), self.requests[request_slot]
        queries, choices = list[Tensor](), list[Selection]()

        def copy_step_state(layer_idx: int, q: Tensor) -> None:
            """Copy what later layers overwrite. Whatever may fail is done after the step."""
            if layer_idx == self.model.spec.indexed_layers[number]:
                queries.append(q[row].float().clone())
                if placed.choosing is not None:
                    both = [of for of in (placed.choosing, placed.own) if of is not None]
                    choices.extend(_of_row(of.chosen(number, placed.runner.rows(batch_size)), row) for of in both)

        output = placed.runner.step_by_calls(batch_size, copy_step_state)
        if request.context_id == NO_CONTEXT:
            return output, None
        shape, artifact = placed.shape, placed.artifacts[request.placed_id]
        view = ContextView(artifact.spec.context_len, shape.softmax_scale, request.config, shape.logit_cap)
        own_len = request.num_segments * self._growth.segment_len
        chosen: Selection | slice = choices[0] if choices else view.middle
        if own_len and choices:
            chosen = join_choices(choices[0], choices[1], view.context_len)
        tail, kv = (
            placed.own_rows.layer(number, request_slot, tail_len),
            artifact.indexed_kv()[number].to(placed.device),
        )
        return output, fidelity(Seen(number, view, queries[0], tail, own_len, chosen), kv)

    def _own_segments(self, request_slot: int, context_id: int, config: SearchConfig) -> OwnSegments | None:
        placed = self._placing.ready()
        if placed.own is None or (context_id == NO_CONTEXT and not grows_without_context(config)):
            return None
        assert isinstance(placed.index_config, SketchConfig)
        return OwnSegments(
            request_slot,
            placed.shape.num_layers,
            partial(placed.own_rows.segment, request_slot),
            config,
            placed.index_config,
            self._growth,
            self._segment_executor,
            partial(place_segment, device=placed.device),
            join_on_device,
            layers_at_once=LAYERS_AT_ONCE,
            parallel_map=self._parallel.map,
        )

    def _settle_rows(self, request_slot: int) -> None:
        """Wait until the rows from `write_rows` are in the tail; from then on they are like rows of steps."""
        request = self.requests[request_slot]
        if request.is_written:
            self._placing.ready().own_rows.settle(request_slot, request.tail_len)
            request.is_written = False
            if request.own is not None:
                request.own.grow(request.tail_len)

    def _grow(self, request_slot: int, tail_len: int, may_move: bool) -> None:
        """Load the own segments that a row with that tail_len reads, and move rows to the host if they are due.

        may_move: False for a draft. If it is dropped, the rows before it read fewer segments, and more rows in the
        tail, which has room for a whole step.
        """
        request, placed = self.requests[request_slot], self._placing.ready()
        num_segments = request.segments_for(tail_len)
        if num_segments != request.num_segments:
            assert request.own is not None and placed.own is not None
            if num_segments:
                num_rows = request.own.num_rows(num_segments)
                placed.own.load(request_slot, request.config, num_rows, request.own.sketches(num_segments))
            else:  # a draft that was dropped read the first one
                placed.own.unload(request_slot)
            request.num_segments = num_segments
        if may_move and placed.own_rows.must_move(request_slot, tail_len):
            assert request.own is not None, "requests that do not grow have tails for all of their rows"
            request.own.finish()
            placed.own_rows.move(request_slot, tail_len)

    def _require_as_captured(self, config: SearchConfig, selector: SelectorName) -> None:
        if selector != self.selector:
            raise ConfigError(
                f"selector is {selector!r}, but steps on this GPU are captured with {self.selector}; leave it out"
            )
        fits = config.keep <= self.config.keep and replace(config, keep=self.config.keep) == self.config
        if selector != "full" and not fits:
            raise ConfigError(
                f"keep is {config.keep} and lookahead {config.lookahead}, but steps on a GPU are captured with up to "
                f"{self.config.keep} and {self.config.lookahead}; ask for no more, and leave the other options out"
            )


def _of_row(selection: DeviceSelection, row: int) -> Selection:
    return Selection(selection.kv_indices[row].cpu().numpy().copy(), selection.valid_len[row].cpu().numpy().copy())


def require_selector(selector: str, placement: str, kv_format: KvFormat | None) -> None:
    """Raise ConfigError for a selector that GPUs do not have, or not in this placement and KV format."""
    everywhere = GPU_SELECTORS[:-1]
    supported = GPU_SELECTORS if placement == "device" and kv_format is None else everywhere
    if selector not in supported:
        raise ConfigError(
            f"selector is {selector!r}, but a GPU decodes with {' or '.join(everywhere)}, or with exact in placement "
            "device without a KV codec, where it has all keys as they were built; choose one of them, or decode on "
            "the CPU"
        )


def step_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes of a service's steps: powers of two up to 64, and max_rows."""
    return (*(size for size in (1, 2, 4, 8, 16, 32, 64) if size < max_rows), max_rows)
