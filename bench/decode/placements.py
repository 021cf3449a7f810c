"""Our own attention in whole steps: contexts of the workload, loaded in each placement."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.decode.op import Options
from bench.decode.periodic import PeriodicSteps
from bench.decode.prepared import TAIL_CAPACITY, TAIL_LEN, Prepared, TooLargeError, require_memory
from bench.decode.roofline import full_bytes, index_bytes, rest_bytes, row_bytes, selected_bytes, table_row_bytes
from bench.decode.sparse_op import index_shape
from bench.decode.tables import distinct_rows
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload, clone_index
from csattn.config import IndexConfig, SearchConfig
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.index import LayerIndex
from csattn.search import LayerSearch, SearchPool
from csattn.search.device import DeviceLayerIndex
from csattn.search.workspace import empty_token_selections
from csattn.table.rows import RowTable
from offload.budget import host_memory_bytes
from offload.host_memory import allocate_rows
from offload.pinned import PinnedRows
from workers.engine import CachedRows, DeviceRows, EngineShape, SearchOnDevice, SearchOnHost

EVERY_STEP, AHEAD, PERIODIC = "every step", "one layer ahead", "every 4th step, keep 0.15"
SLOTS = 0.14  # of the context: rows that a slot cache holds
KV_BYTES = 16 << 30  # of different layers in pinned memory
SEARCHED_STEPS = 4  # on the CPU, with no device beside it


def schedules(search: SearchConfig, placement: str) -> list[tuple[str, SearchConfig]]:
    """The published ones: at every step by its own query, ahead by a predicted one, and every fourth step."""
    named = {
        EVERY_STEP: search,
        AHEAD: replace(search, lookahead=1),
        PERIODIC: replace(search, keep=0.15, search_period=4),
    }
    offered = {"device": (EVERY_STEP, AHEAD, PERIODIC), "hybrid": (EVERY_STEP, AHEAD), "host": (AHEAD,)}
    return [(name, named[name]) for name in offered[placement]]


def placed(work: Workload, options: Options, index_name: str, placement: str, search: SearchConfig) -> Prepared:
    """Plan a placement and load every request's context into it."""
    prepare: dict[str, Callable[..., Prepared]] = {"device": _on_device, "hybrid": _hybrid, "host": _on_host}
    return prepare[placement](work, options, index_name, search)


def _on_device(work: Workload, options: Options, index_name: str, search: SearchConfig) -> Prepared:
    shape, config = options.shape, work.recorded.indexes[index_name][0].config
    per_layer = full_bytes(shape, work.context_len) + index_bytes(shape, config, work.context_len)
    require_memory(work.num_contexts * shape.num_layers * per_layer, "context KV and index on the device")
    engine = engine_shape(work, options, config, search)
    far = DeviceRows(engine, work.device)
    steps = (PeriodicSteps if search.search_period > 1 else SearchOnDevice)(
        engine, index_shape(config, shape), far, work.device
    )
    kv, index = layers_of(work.rows, shape.num_layers), indexes_of(work, shape.num_layers, index_name)
    for context_id in range(work.num_contexts):
        own_kv = [layer.clone() for layer in kv] if context_id else kv
        far.load(context_id, own_kv)
        steps.load(context_id, own_kv, [clone_index(layer) for layer in index] if context_id else index)
    return Prepared(steps, step_bytes(work, options, index_name, search), period=search.search_period)


def _hybrid(work: Workload, options: Options, index_name: str, search: SearchConfig) -> Prepared:
    shape, config = options.shape, work.recorded.indexes[index_name][0].config
    num_slots = round(SLOTS * work.context_len)
    per_layer = round(SLOTS * full_bytes(shape, work.context_len)) + index_bytes(shape, config, work.context_len)
    require_memory(work.num_contexts * shape.num_layers * per_layer, "slot cache and index on the device")
    engine = engine_shape(work, options, config, search)
    far = CachedRows(engine, num_slots, work.device)
    steps = SearchOnDevice(engine, index_shape(config, shape), far, work.device)
    kv, index = host_rows(work, shape.num_layers), indexes_of(work, shape.num_layers, index_name)
    for context_id in range(work.num_contexts):
        far.load(context_id, kv)
        steps.load(context_id, kv.layers, [clone_index(layer) for layer in index] if context_id else index)

    least = step_bytes(work, options, index_name, search)
    return Prepared(steps, least, partial(cache_facts, far, work, options), far.cache.clear_statistics)


def _on_host(work: Workload, options: Options, index_name: str, search: SearchConfig) -> Prepared:
    shape, config = options.shape, work.recorded.indexes[index_name][0].config
    if config.layout != "rows":
        raise ConfigError(f"index {index_name!r} has lists; the placement `host` is measured with rows only")
    slots_bytes = round(SLOTS * full_bytes(shape, work.context_len)) * shape.num_layers * work.num_contexts
    require_memory(slots_bytes, "slot cache on the device")
    kv_bytes = min(KV_BYTES, full_bytes(shape, work.context_len) * NUM_WIDE_LAYERS)
    stored = kv_bytes + shape.num_layers * index_bytes(shape, config, work.context_len)
    if stored > host_memory_bytes():
        raise TooLargeError(
            f"KV and index take {stored / 1e9:.1f} GB of {host_memory_bytes() / 1e9:.1f} GB on the host"
        )
    engine = engine_shape(work, options, config, search)
    far = CachedRows(engine, round(SLOTS * work.context_len), work.device)
    pool = SearchPool(available_cpus())
    steps = SearchOnHost(engine, far, pool, work.device)
    kv, index = host_rows(work, shape.num_layers), host_indexes(work, shape.num_layers, index_name)
    for context_id in range(work.num_contexts):
        far.load(context_id, kv)
        steps.load(context_id, kv.layers, index)

    def facts(num_steps: int) -> dict[str, Any]:
        cpu_us = cpu_search_us(work, index, pool, search, shape.softmax_scale)
        return {**cache_facts(far, work, options, num_steps), "cpu_search_us": round(cpu_us, 1)}

    num_rows = search.top_k(work.context_len) + search.sink_len + search.window_len + TAIL_LEN
    rest = shape.num_kv_heads * rest_bytes(shape) if search.estimate_rest else 0
    least = work.batch_size * shape.num_layers * (row_bytes(shape) * num_rows + rest)
    return Prepared(steps, least, facts, far.cache.clear_statistics, close=pool.close)


def cache_facts(far: CachedRows, work: Workload, options: Options, num_steps: int) -> dict[str, Any]:
    """What the slot cache has done since its statistics were cleared."""
    layers = far.cache.statistics()
    selected = sum(layer.num_selected for layer in layers)
    crossed = sum(layer.num_moved + layer.num_spilled for layer in layers)
    kv_bytes = work.num_contexts * options.shape.num_layers * full_bytes(options.shape, work.context_len)
    return {
        "hit_rate": round(sum(layer.num_found for layer in layers) / selected, 4),
        "link_bytes": round(crossed * far.cache.shape.row_bytes / num_steps),
        "link_of_selection": round(crossed / selected, 4),
        "kv_in_hbm": round(far.cache.rows.nbytes / kv_bytes, 4),
    }


def cpu_search_us(
    work: Workload, index: list[LayerIndex], pool: SearchPool, search: SearchConfig, softmax_scale: float
) -> float:
    """How long the CPU searches a layer for the whole batch: the median over all layers of a few steps."""
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
    """Every layer's rows, at addresses of their own."""
    first = [make(layer_idx) for layer_idx in range(min(NUM_WIDE_LAYERS, num_layers))]
    return first + [first[layer_idx % len(first)].clone() for layer_idx in range(len(first), num_layers)]


def indexes_of(work: Workload, num_layers: int, index_name: str) -> list[DeviceLayerIndex]:
    """Every layer's index, likewise."""
    num_distinct = min(len(work.recorded.indexes[index_name]), num_layers)
    first = [work.index(layer_idx, index_name) for layer_idx in range(num_distinct)]
    return first + [clone_index(first[layer_idx % num_distinct]) for layer_idx in range(num_distinct, num_layers)]


def host_rows(work: Workload, num_layers: int) -> PinnedRows:
    """A context's KV in pinned memory. Layers share some of it, as much as `KV_BYTES` allow: pinning takes its time.

    They, and the requests of a batch, ask for different rows at any one step, so a row does not come out of the host's
    cache because somebody else has just had it. What rows hold does not steer a step: the index does.
    """
    first = work.rows(0)
    num_distinct = max(1, min(NUM_WIDE_LAYERS, num_layers, KV_BYTES // first.nbytes))
    layers = allocate_rows(num_distinct, first.shape, first.dtype)
    for layer_idx, layer in enumerate(layers):
        layer.copy_(work.rows(layer_idx))
    return PinnedRows([layers[layer_idx % num_distinct] for layer_idx in range(num_layers)])


def host_indexes(work: Workload, num_layers: int, index_name: str) -> list[LayerIndex]:
    """A context's index in host memory, every layer's at addresses of its own: no two searches read the same rows."""
    layers = work.recorded.indexes[index_name]
    tables = [work.table(layer_idx, index_name) for layer_idx in range(min(len(layers), num_layers))]
    codes = allocate_rows(num_layers, tables[0][0].shape, torch.uint8)
    indexes = []
    for layer_idx, target in enumerate(codes):
        layer, (on_device, scales) = layers[layer_idx % len(layers)], tables[layer_idx % len(layers)]
        table = RowTable(target.copy_(on_device).numpy(), scales.cpu().numpy(), work.context_len)
        indexes.append(
            LayerIndex(
                query_basis=layer.query_basis,
                codebooks=layer.codebooks,
                key_basis=layer.key_basis,
                key_mean=layer.key_mean,
                table=table,
                weigh_by_norm=layer.config.weigh_by_norm,
                pool_group=layer.config.pool_group,
            )
        )
    return indexes


def step_bytes(work: Workload, options: Options, index_name: str, search: SearchConfig) -> float:
    """What search and attention of a step must read of the device's memory, all layers and requests."""
    shape, indexes = options.shape, work.recorded.indexes[index_name]
    config = indexes[0].config
    num_index_heads = shape.num_kv_heads if config.share_group else shape.num_q_heads
    rows_read = distinct_rows(work.queries(0)[:64, 0], indexes[0])
    table = rows_read * num_index_heads * table_row_bytes(config, work.context_len) / search.search_period
    kept = selected_bytes(shape, work.context_len, search.keep) * num_index_heads // shape.num_kv_heads
    resident = (search.sink_len + search.window_len + TAIL_LEN) * row_bytes(shape)
    rest = num_index_heads * rest_bytes(shape) if search.estimate_rest else 0
    return work.batch_size * shape.num_layers * (table + kept + resident + rest)


def engine_shape(work: Workload, options: Options, config: IndexConfig, search: SearchConfig) -> EngineShape:
    shape = options.shape
    return EngineShape(
        num_layers=shape.num_layers,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        num_index_heads=shape.num_kv_heads if config.share_group else shape.num_q_heads,
        head_dim=shape.head_dim,
        dtype=DTYPE,
        softmax_scale=shape.softmax_scale,
        search=replace(search, search_period=1),
        max_context_len=work.context_len,
        batch_sizes=(work.batch_size,),
        num_contexts=work.num_contexts,
        num_tails=work.batch_size,
        tail_capacity=TAIL_CAPACITY,
    )
