"""csattn's attention in whole steps: a workload's contexts, loaded in each placement."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.decode.forked import InMemoryContext, forked_searcher
from bench.decode.options import AHEAD, EVERY_STEP, SLOTS, Options
from bench.decode.prepared import TAIL_CAPACITY, TAIL_LEN, Prepared, TooLargeError, require_memory
from bench.decode.roofline import full_bytes, index_bytes, layer_bytes
from bench.decode.variants import num_segments, of_variant
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload, clone_index
from csattn.config import IndexConfig, SearchConfig, SketchConfig, num_index_heads
from csattn.cpus import available_cpus
from csattn.index import ListIndex
from csattn.models.spec import ModelSpec
from csattn.search import LayerSearch, SearchPool
from csattn.search.device import DeviceLayerIndex, IndexShape, index_shape, to_device
from csattn.search.workspace import empty_token_selections
from csattn.sketch import SketchIndex
from offload.budget import host_memory_bytes
from offload.host_memory import allocate_rows
from offload.pinned import PinnedRows
from workers.engine.gpu.attend_all import AttendAll, StreamedRows, streamed_bytes
from workers.engine.gpu.far_rows import CachedRows, DeviceRows, context_layers
from workers.engine.gpu.memory import index_is_on_device
from workers.engine.gpu.on_device import SearchOnDevice, StepSearch
from workers.engine.gpu.on_host import SearchOnHost, StepSearcher
from workers.engine.gpu.shape import EngineShape
from workers.searchers.step_searches import StepSearches

KV_BYTES = 16 << 30  # of distinct layers in pinned memory
SEARCHED_STEPS = 4  # steps whose searches are timed on the CPU by themselves


def schedules(search: SearchConfig, placement: str) -> list[tuple[str, SearchConfig]]:
    """Return a placement's schedules: choosing at every step by the layer's own query, or ahead by a predicted one.

    Where the CPU searches, there is only the latter.
    """
    period = f", at every {search.search_period}th token" if search.search_period > 1 else ""
    ahead = AHEAD + period, replace(search, lookahead=1)
    return [ahead] if placement.startswith("host") else [(EVERY_STEP + period, search), ahead]


def placed(work: Workload, options: Options, variant: str, placement: str, search: SearchConfig) -> Prepared:
    """Plan a placement and load every request's context. In `host+2` two workers search, in `host` threads."""
    name, _, num_workers = placement.partition("+")
    if num_workers:
        return _on_host(work, options, *of_variant(variant, search), int(num_workers))
    prepare = {"device": _on_device, "hybrid": _hybrid, "host": _on_host}[name]
    return prepare(work, options, *of_variant(variant, search))


def streamed(work: Workload, options: Options) -> Prepared:
    """Load all rows to host memory. They are copied layer by layer, as the engine does for the selector `full`."""
    engine = replace(engine_shape(work, options, SketchConfig(), options.search), rest="none", attends_all=True)
    require_memory(streamed_bytes(engine), "two layers of every context on the device")
    far, kv = StreamedRows(engine, work.device), host_rows(work, engine)
    for context_id in range(work.num_contexts):
        far.load(context_id, kv)
    link_bytes = work.num_contexts * engine.kv_bytes(work.context_len)
    facts = {"link_bytes": link_bytes}
    return Prepared(AttendAll(engine, far, work.device), 2 * link_bytes, lambda _: facts, close=kv.close, is_slow=True)


def all_rows(work: Workload, options: Options) -> Prepared:
    """Load all rows to the device and attend to all, as the engine does for `full`, or where choosing is slower."""
    engine = replace(engine_shape(work, options, SketchConfig(), options.search), rest="none", attends_all=True)
    moved = work.num_contexts * engine.kv_bytes(work.context_len)
    require_memory(moved, "the KV of all contexts on the device")
    far = DeviceRows(engine, work.device)
    kv = layers_of(lambda layer_idx: encode_rows(work.rows(layer_idx), engine), options.num_layers)
    for context_id in range(work.num_contexts):
        far.load(context_id, [layer.clone() for layer in kv] if context_id else kv)
    return Prepared(AttendAll(engine, far, work.device, zero_sinks(engine, work.device)), moved)


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """Steps that search on the device, and what the first context has, layer by layer; the others have copies of it."""

    steps: SearchOnDevice
    far: DeviceRows | CachedRows
    kv: Sequence[Tensor]
    index: Sequence[DeviceLayerIndex]


def device_steps(
    work: Workload, options: Options, config: IndexConfig, search: SearchConfig, slots: float | None = None
) -> DeviceSteps:
    """Load every context. slots: the share of its rows that a slot cache holds; None: all rows are on the device."""
    shape, share = options.shape, 1 if slots is None else slots
    per_layer = round(share * full_bytes(shape, work.context_len)) + index_bytes(shape, config, work.context_len)
    require_memory(work.num_contexts * options.num_layers * per_layer, "KV or slot cache, and index, on the device")
    index = indexes_of(work, options.num_layers, config)
    return load_steps(work, options, config, search, slots, index, clone_index)


def load_steps(
    work: Workload,
    options: Options,
    config: IndexConfig,
    search: SearchConfig,
    slots: float | None,  # as in `device_steps`
    index: Sequence[Any],  # of the first context, layer by layer
    clone: Callable[[Any], Any],  # copies a layer's index to other addresses
    searches: Mapping[int, StepSearch] | None = None,  # see `SearchOnDevice`
) -> DeviceSteps:
    """Load every context, each with an index, and rows on the device, at addresses of its own."""
    engine = engine_shape(work, options, config, search)
    far: DeviceRows | CachedRows = DeviceRows(engine, work.device)
    if slots is not None:
        far = CachedRows(engine, round(slots * work.context_len), work.device)
    sinks = zero_sinks(engine, work.device)
    index_shape = _index_shape(config, options.shape)
    steps = SearchOnDevice(engine, index_shape, far, work.device, sinks=sinks, searches=searches)
    host = host_rows(work, engine) if isinstance(far, CachedRows) else None
    kv = layers_of(lambda i: encode_rows(work.rows(i), engine), options.num_layers) if host is None else host.layers
    for context_id in range(work.num_contexts):
        own_kv = [layer.clone() for layer in kv] if host is None and context_id else kv
        if isinstance(far, DeviceRows):
            far.load(context_id, own_kv)
        elif host is not None:
            far.load(context_id, host)
        steps.load(context_id, own_kv, [clone(layer) for layer in index] if context_id else index)
    return DeviceSteps(steps, far, kv, index)


def _on_device(work: Workload, options: Options, config: IndexConfig, search: SearchConfig) -> Prepared:
    return Prepared(device_steps(work, options, config, search).steps, _step_bytes(work, options, config, search))


def _hybrid(work: Workload, options: Options, config: IndexConfig, search: SearchConfig) -> Prepared:
    loaded = device_steps(work, options, config, search, slot_share(options, search))
    return with_cache(loaded, _step_bytes(work, options, config, search), work, options)


def with_cache(loaded: DeviceSteps, step_bytes: float, work: Workload, options: Options) -> Prepared:
    """Return steps with the figures of their slot cache, if they have one."""
    if isinstance(loaded.far, DeviceRows):
        return Prepared(loaded.steps, step_bytes)
    facts = partial(cache_facts, loaded.far, work, options)
    return Prepared(loaded.steps, step_bytes, facts, loaded.far.cache.clear_statistics)


def _on_host(
    work: Workload, options: Options, config: IndexConfig, search: SearchConfig, num_workers: int = 0
) -> Prepared:
    shape, engine = options.shape, engine_shape(work, options, config, search)
    indexed = options.num_layers * index_bytes(shape, config, work.context_len)
    codes = work.num_contexts * indexed * index_is_on_device(engine, "host")  # on the device, for attention to the rest
    share = slot_share(options, search)
    slots_bytes = round(share * full_bytes(shape, work.context_len)) * options.num_layers * work.num_contexts
    require_memory(slots_bytes + codes, "slot cache and codes on the device")
    stored = min(KV_BYTES, full_bytes(shape, work.context_len) * NUM_WIDE_LAYERS) + indexed
    if stored > host_memory_bytes():
        raise TooLargeError(
            f"KV and index take {stored / 1e9:.1f} GB of {host_memory_bytes() / 1e9:.1f} GB on the host"
        )
    far = CachedRows(engine, round(share * work.context_len), work.device)
    kv, index = host_rows(work, engine), work.host_indexes(options.num_layers, config)
    pool = SearchPool(options.num_threads or available_cpus())
    searcher: StepSearcher = StepSearches(pool)
    if num_workers:
        searcher = forked_searcher(InMemoryContext(shape, index), num_workers, work.num_contexts)
    steps = SearchOnHost(
        engine, _index_shape(config, shape), far, searcher, work.device, sinks=zero_sinks(engine, work.device)
    )
    for context_id in range(work.num_contexts):
        far.load(context_id, kv)
        steps.load(context_id, kv.layers, (to_device(layer, work.device) for layer in index))
        if isinstance(searcher, StepSearches):
            searcher.load_layers(context_id, index)

    def close() -> None:
        steps.close()
        searcher.close()
        pool.close()

    def facts(num_steps: int) -> dict[str, Any]:
        cpu_us = cpu_search_us(work, index, pool, search, shape.softmax_scale)
        return {**cache_facts(far, work, options, num_steps), "cpu_search_us": round(cpu_us, 1)}

    moved = least_bytes(work, options, config, replace(search, lookahead=0))
    on_device = moved["rows"] + (moved["index"] if engine.rest == "sketch" else 0)
    least = options.num_layers * on_device
    return Prepared(steps, least, facts, far.cache.clear_statistics, close=close)


def slot_share(options: Options, search: SearchConfig) -> float:
    """Return the share of a context's rows that a slot cache holds: even a choice of 20 % (for eight tokens) fits."""
    return max(options.slots or SLOTS, 1.25 * search.keep)


def cache_facts(far: CachedRows, work: Workload, options: Options, num_steps: int) -> dict[str, Any]:
    """Return the slot cache's hit rate and traffic since its statistics were cleared."""
    layers = far.cache.statistics()
    selected = sum(layer.num_selected for layer in layers)
    crossed = sum(layer.num_moved + layer.num_spilled for layer in layers)
    kv_bytes = work.num_contexts * options.num_layers * full_bytes(options.shape, work.context_len)
    return {
        "hit_rate": round(sum(layer.num_found for layer in layers) / selected, 4),
        "link_bytes": round(crossed * far.cache.shape.row_bytes / num_steps),
        "link_of_selection": round(crossed / selected, 4),
        "kv_in_hbm": round(far.cache.rows.nbytes / kv_bytes, 4),
    }


def cpu_search_us(
    work: Workload, index: list[ListIndex | SketchIndex], pool: SearchPool, search: SearchConfig, softmax_scale: float
) -> float:
    """Return how many µs the CPU searches a layer for the whole batch: the median over all layers of a few steps."""
    rules = search.sink_len, search.window_len, softmax_scale
    searches = []
    for layer_idx, layer in enumerate(index):
        q = work.queries(layer_idx, "predicted")[layer_idx].float().cpu().numpy()
        out = empty_token_selections(len(q), layer.num_heads, search.top_k(work.context_len))
        searches.append(LayerSearch(q, layer, None, *rules, out))
    times_us = []
    for layer_search in SEARCHED_STEPS * searches:
        started = time.perf_counter()
        pool.search_layers([layer_search])
        times_us.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times_us)


def layers_of(make: Callable[[int], Tensor], num_layers: int) -> list[Tensor]:
    """Make every layer's rows, each at addresses of its own."""
    first = [make(layer_idx) for layer_idx in range(min(NUM_WIDE_LAYERS, num_layers))]
    return first + [first[layer_idx % len(first)].clone() for layer_idx in range(len(first), num_layers)]


def indexes_of(work: Workload, num_layers: int, config: IndexConfig) -> list[DeviceLayerIndex]:
    """Build every layer's index, each at addresses of its own."""
    first = [work.index(layer_idx, config) for layer_idx in range(min(NUM_WIDE_LAYERS, num_layers))]
    return first + [clone_index(first[layer_idx % len(first)]) for layer_idx in range(len(first), num_layers)]


def encode_rows(rows: Tensor, engine: EngineShape) -> Tensor:
    """Return a layer's rows on the device as contexts keep them: coded if the engine has a `kv_format`."""
    if engine.kv_format is None:
        return rows
    (coded,) = context_layers(engine, [rows.cpu()])
    return coded.to(rows.device)


def host_rows(work: Workload, engine: EngineShape) -> PinnedRows:
    """Load a context's KV into pinned memory. Layers share memory beyond `KV_BYTES`, because pinning is slow.

    Layers that share memory, and requests of a batch, need different rows at any one step, so a row is not in the
    host's cache because another has just read it. The contents of rows do not change the course of a step: the index
    chooses.
    """
    first, num_layers = encode_rows(work.rows(0), engine), engine.num_layers
    num_distinct = max(1, min(NUM_WIDE_LAYERS, num_layers, KV_BYTES // first.nbytes))
    layers = allocate_rows(num_distinct, first.shape, first.dtype)
    for layer_idx, layer in enumerate(layers):
        layer.copy_(encode_rows(work.rows(layer_idx), engine))
    return PinnedRows([layers[layer_idx % num_distinct] for layer_idx in range(num_layers)])


def least_bytes(work: Workload, options: Options, config: IndexConfig, search: SearchConfig) -> dict[str, int]:
    """Return the bytes of device memory that search and attention must read in one layer, for all requests."""
    shape, resident = options.shape, search.sink_len + search.window_len + TAIL_LEN
    moved = layer_bytes(shape, config, search, work.context_len, resident, work.batch_size, work.num_contexts)
    engine = engine_shape(work, options, config, search)
    return {**moved, "rows": moved["rows"] * engine.context_row_bytes // engine.row_bytes}


def _step_bytes(work: Workload, options: Options, config: IndexConfig, search: SearchConfig) -> int:
    return options.num_layers * sum(least_bytes(work, options, config, search).values())


def zero_sinks(engine: EngineShape, device: torch.device, num_layers: int | None = None) -> Tensor | None:
    """Return [num_layers, num_q_heads] float32 sink logits, if the model has any. Default: of the searched layers."""
    return torch.zeros(num_layers or engine.num_layers, engine.num_q_heads, device=device) if engine.has_sinks else None


def _index_shape(config: IndexConfig, shape: ModelSpec) -> IndexShape:
    return index_shape(config, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)


def engine_shape(
    work: Workload,
    options: Options,
    config: IndexConfig,
    search: SearchConfig,
) -> EngineShape:
    shape, searched = options.shape, options.shape.layers[options.shape.indexed_layers[0]].attention
    return EngineShape(
        num_layers=options.num_layers,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        num_index_heads=num_index_heads(config, shape.num_q_heads, shape.num_kv_heads),
        head_dim=shape.head_dim,
        dtype=DTYPE,
        softmax_scale=shape.softmax_scale,
        search=search,
        max_context_len=work.context_len,
        batch_sizes=(work.batch_size,),
        num_contexts=work.num_contexts,
        num_tails=work.batch_size,
        tail_capacity=TAIL_CAPACITY,
        rest=search.rest or "none",
        max_segments=num_segments(config, work.context_len),
        kv_format=options.kv_format,
        logit_cap=searched.logit_cap,
        has_sinks=searched.sinks,
        local=tuple(x for x in (layer.attention.reach for layer in shape.layers) if x is not None),
    )
