"""Whole steps of other methods: rows are chosen their way, and everything else is csattn's."""

from dataclasses import replace
from functools import partial
from typing import cast

from torch import Tensor

from bench.decode.options import Options
from bench.decode.other_methods import INDEXES, PAGE_LEN, MethodIndex, index_bytes, read_bytes, search_of
from bench.decode.placements import cache_facts, encode_rows, engine_shape, host_rows, layers_of, slot_share, zero_sinks
from bench.decode.prepared import TAIL_LEN, Prepared, require_memory
from bench.decode.roofline import full_bytes, row_bytes
from bench.decode.variants import INDEXES as OUR_INDEXES
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.search.device import DeviceLayerIndex, index_shape
from workers.engine.gpu.far_rows import CachedRows, DeviceRows
from workers.engine.gpu.on_device import SearchOnDevice


def by_other_method(work: Workload, options: Options, method: str, placement: str, search: SearchConfig) -> Prepared:
    """Load every request's context: all rows on the device, or in `hybrid` the index and a slot cache.

    All rows are loaded for H2O too, though it needs only those that it keeps. Raises ConfigError for a case that is not
    measured.
    """
    if placement not in ("device", "hybrid") or search.lookahead or search.search_period > 1:
        raise ConfigError(f"{method} is measured in device and hybrid, chosen at every step; not in {placement}, ahead")
    if work.context_len % PAGE_LEN:
        raise ConfigError(f"{method} is measured over whole pages of {PAGE_LEN} rows, not over {work.context_len} rows")
    if method == "quest" and search.top_k(work.context_len) < PAGE_LEN:
        raise ConfigError(f"{100 * search.keep:g} % of {work.context_len} rows are less than a page of Quest's")
    shape, search, share = options.shape, replace(search, rest="none"), slot_share(options, search)
    rows_bytes = round((1 if placement == "device" else share) * full_bytes(shape, work.context_len))
    require_memory(work.num_contexts * options.num_layers * (rows_bytes + index_bytes(method, work)), "rows and index")
    # as csattn's lists: a table of addresses, and one choice for each KV head
    config = OUR_INDEXES["lists"]
    engine = engine_shape(work, options, config, search)
    far: DeviceRows | CachedRows = DeviceRows(engine, work.device)
    if placement == "hybrid":
        far = CachedRows(engine, round(share * work.context_len), work.device)
    steps = SearchOnDevice(
        engine,
        index_shape(config, shape.num_q_heads, shape.num_kv_heads, shape.head_dim),
        far,
        work.device,
        sinks=zero_sinks(engine, work.device),
        searches={work.batch_size: search_of(method, work, DTYPE, search)},
    )
    layers = [INDEXES[method](work.keys(layer_idx)) for layer_idx in range(min(NUM_WIDE_LAYERS, options.num_layers))]
    host = host_rows(work, engine) if isinstance(far, CachedRows) else None
    for context_id in range(work.num_contexts):
        index = [_clone(layers[i % len(layers)]) for i in range(options.num_layers)]
        kv = layers_of(lambda i: encode_rows(work.rows(i), engine), options.num_layers) if host is None else host.layers
        if isinstance(far, DeviceRows):
            far.load(context_id, kv)
        elif host is not None:
            far.load(context_id, host)
        steps.load(context_id, kv, cast(list[DeviceLayerIndex], index))
    resident = search.sink_len + search.window_len + TAIL_LEN
    rows = row_bytes(shape) * (search.top_k(work.context_len) + resident)
    least = options.num_layers * work.batch_size * (read_bytes(method, work) + rows)
    if isinstance(far, CachedRows):
        return Prepared(steps, least, partial(cache_facts, far, work, options), far.cache.clear_statistics)
    return Prepared(steps, least)


def _clone(index: MethodIndex) -> MethodIndex:
    """Copy an index to other addresses."""
    copies = dict[int, Tensor]()
    for part in index.parts:
        copies.setdefault(part.data_ptr(), part.clone())
    first, second, third, fourth = (copies[part.data_ptr()] for part in index.parts)
    return MethodIndex((first, second, third, fourth), index.length)
