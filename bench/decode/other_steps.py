"""Whole steps of other methods: rows are chosen their way, and everything else is csattn's."""

from dataclasses import replace

from torch import Tensor

from bench.decode.options import Options
from bench.decode.other_methods import INDEXES, PAGE_LEN, MethodIndex, index_bytes, read_bytes, search_of
from bench.decode.placements import load_steps, slot_share, with_cache
from bench.decode.prepared import TAIL_LEN, Prepared, require_memory
from bench.decode.roofline import full_bytes, row_bytes
from bench.decode.variants import INDEXES as OUR_INDEXES
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import DTYPE, Workload
from csattn.config import SearchConfig
from csattn.errors import ConfigError


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
    shape, search = options.shape, replace(search, rest="none")
    slots = slot_share(options, search) if placement == "hybrid" else None
    rows_bytes = round((slots or 1) * full_bytes(shape, work.context_len))
    require_memory(work.num_contexts * options.num_layers * (rows_bytes + index_bytes(method, work)), "rows and index")
    distinct = [INDEXES[method](work.keys(layer_idx)) for layer_idx in range(min(NUM_WIDE_LAYERS, options.num_layers))]
    index = [_clone(distinct[layer_idx % len(distinct)]) for layer_idx in range(options.num_layers)]
    config = OUR_INDEXES["lists"]  # as csattn's lists: a table of addresses, and one choice for each KV head
    searches = {work.batch_size: search_of(method, work, DTYPE, search)}
    loaded = load_steps(work, options, config, search, slots, index, _clone, searches)
    resident = search.sink_len + search.window_len + TAIL_LEN
    rows = row_bytes(shape) * (search.top_k(work.context_len) + resident)
    least = options.num_layers * work.batch_size * (read_bytes(method, work) + rows)
    return with_cache(loaded, least, work, options)


def _clone(index: MethodIndex) -> MethodIndex:
    """Copy an index to other addresses."""
    copies = dict[int, Tensor]()
    for part in index.parts:
        copies.setdefault(part.data_ptr(), part.clone())
    first, second, third, fourth = (copies[part.data_ptr()] for part in index.parts)
    return MethodIndex((first, second, third, fourth), index.length)
