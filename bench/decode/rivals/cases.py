"""The rivals over the workload's contexts, ready to be stepped: each prepares what it keeps of a context."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.decode.options import Options
from bench.decode.placements import SLOTS, cache_facts, engine_shape, host_rows
from bench.decode.prepared import TAIL_LEN, Prepared, TooLargeError, require_memory
from bench.decode.rivals.choosers import PqChooser, SparqChooser
from bench.decode.rivals.chosen import ChosenSteps
from bench.decode.rivals.chosen_on_device import PqOnDeviceSteps
from bench.decode.rivals.heavy import HeavySteps, heavy_rows
from bench.decode.rivals.keys import attention_received, hash_tables, quantise
from bench.decode.rivals.sampled import HashedLayer, SampledSteps
from bench.decode.roofline import full_bytes, row_bytes
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import Workload
from csattn.cpu.team import Team
from csattn.cpus import available_cpus
from csattn.selectors import ContextView
from offload.budget import host_memory_bytes
from offload.host_memory import allocate_rows
from workers.engine import CachedRows, EngineShape

PQ_SLOTS = 4096  # rows that PQCache's own cache has per layer
COMPONENT_SHARE = 4  # SparQ reads one of so many channels
NUM_BITS, NUM_TABLES = 10, 150  # MagicPIG's K and L


def h2o(work: Workload, options: Options) -> Prepared:
    """What has received most of the recorded queries' attention, as much as is kept, and the resident rows."""
    engine, view = _shape_and_view(work, options)
    num_kept = view.top_k + work.context_len - (view.middle.stop - view.middle.start)
    kept_bytes = work.batch_size * engine.num_layers * row_bytes(options.shape) * num_kept
    require_memory(kept_bytes, "the rows that are left")
    steps = HeavySteps(engine, num_kept, work.device)
    for wide_idx in range(min(NUM_WIDE_LAYERS, engine.num_layers)):
        received = attention_received(work.queries(wide_idx)[:, 0], work.keys(wide_idx), engine.softmax_scale)
        ids = heavy_rows(received, view.middle, view.top_k)
        kept = work.rows(wide_idx)[torch.arange(len(ids), device=work.device)[:, None], ids]
        for layer_idx in range(wide_idx, engine.num_layers, NUM_WIDE_LAYERS):
            for context_id in range(work.batch_size):
                steps.load(context_id, layer_idx, kept, received.gather(1, ids))
    least = kept_bytes + work.batch_size * engine.num_layers * row_bytes(options.shape) * TAIL_LEN
    return Prepared(steps, least, lambda _: {"link_bytes": 0})


def magicpig(work: Workload, options: Options) -> Prepared:
    """Tables of 10 bits, 150 of them, over every key."""
    engine, view = _shape_and_view(work, options)
    heads, team = engine.num_kv_heads, Team(available_cpus())
    _require_host(
        NUM_WIDE_LAYERS * (full_bytes(options.shape, work.context_len) + 4 * heads * NUM_TABLES * work.context_len)
    )
    generator = torch.Generator(work.device).manual_seed(1)
    size = engine.head_dim, NUM_TABLES * NUM_BITS
    projections = torch.randn(size, generator=generator, device=work.device)
    resident_ids = [*range(view.middle.start), *range(view.middle.stop, work.context_len)]
    steps = SampledSteps(engine, projections, NUM_TABLES, view.middle, len(resident_ids), team)
    hashed, resident = [], []
    for wide_idx in range(min(NUM_WIDE_LAYERS, engine.num_layers)):
        rows = work.rows(wide_idx)
        (kv,) = allocate_rows(1, rows.shape, rows.dtype)
        tables = hash_tables(rows[:, :, 0], projections, NUM_TABLES)
        bits = kv.copy_(rows).view(torch.int16).numpy().view("uint16")
        hashed.append(HashedLayer(bits, *(table.numpy() for table in tables)))
        resident.append(rows[:, resident_ids])
    layers = range(engine.num_layers)
    for context_id in range(work.batch_size):
        steps.load(context_id, [hashed[i % len(hashed)] for i in layers], [resident[i % len(hashed)] for i in layers])

    def facts(num_steps: int) -> dict[str, Any]:
        rows = len(steps.search_us) * work.batch_size * engine.num_q_heads * work.context_len
        mail = engine.num_q_heads * (4 * engine.head_dim + 2 * NUM_TABLES + 4 * (engine.head_dim + 2))

        return {
            "link_bytes": work.batch_size * engine.num_layers * mail,
            "sampled_share": round(steps.num_sampled / rows, 4),
            "cpu_search_us": round(statistics.median(steps.search_us), 1),
        }

    least = work.batch_size * engine.num_layers * row_bytes(options.shape) * (len(resident_ids) + TAIL_LEN)
    return Prepared(steps, least, facts, steps.start_counting, close=team.close)


def pqcache(work: Workload, options: Options) -> Prepared:
    """Two codes of 8 bits a key, on the host and searched there."""
    engine, view = _shape_and_view(work, options)
    team = Team(available_cpus())
    layers = [quantise(work.keys(i)) for i in range(min(NUM_WIDE_LAYERS, engine.num_layers))]
    centroids = [c.cpu().numpy() for c, _ in layers]
    # codes are small: layers that shared them would find them in the cache
    codes = [layers[i % len(layers)][1].permute(1, 2, 0).cpu().contiguous().numpy() for i in range(engine.num_layers)]
    chooser = PqChooser(
        engine, view.middle, [centroids[i % len(layers)] for i in range(engine.num_layers)], codes, team
    )
    return _chosen_on_cpu(work, options, engine, view, chooser, team, max(PQ_SLOTS, round(SLOTS * work.context_len)))


def pqcache_on_device(work: Workload, options: Options) -> Prepared:
    """The same codes, sent to the device at every step and searched there, as in the authors' code."""
    engine, view = _shape_and_view(work, options)
    far = _cached_rows(engine, options, work, max(PQ_SLOTS, round(SLOTS * work.context_len)))
    layers = [quantise(work.keys(i)) for i in range(min(NUM_WIDE_LAYERS, engine.num_layers))]
    centroids = [layers[i % len(layers)][0] for i in range(engine.num_layers)]
    codes = [layers[i % len(layers)][1].cpu().pin_memory() for i in range(engine.num_layers)]
    steps = PqOnDeviceSteps(engine, far, view.middle, centroids, codes, work.device)
    _load(work, engine, far, steps)
    code_bytes = sum(layer.nbytes for layer in codes)

    def facts(num_steps: int) -> dict[str, Any]:
        of_cache = cache_facts(far, work, options, num_steps)
        return {**of_cache, "link_bytes": of_cache["link_bytes"] + code_bytes}

    least = _step_bytes(work, options, view) + 2 * code_bytes
    return Prepared(steps, least, facts, far.cache.clear_statistics)


def sparq(work: Workload, options: Options) -> Prepared:
    """The keys a second time on the host, channel by channel."""
    engine, view = _shape_and_view(work, options)
    team = Team(available_cpus())
    num_wide = min(NUM_WIDE_LAYERS, engine.num_layers)
    _require_host(num_wide * full_bytes(options.shape, work.context_len) * 3 // 2)
    size = engine.num_kv_heads, engine.head_dim, work.context_len
    channels = allocate_rows(num_wide, size, engine.dtype)
    sums = []
    for wide_idx, target in enumerate(channels):
        target.copy_(work.keys(wide_idx).mT.contiguous())
        sums.append(work.values(wide_idx).sum(1, dtype=torch.float32).cpu())
    bits = [layer.view(torch.int16).numpy().view("uint16") for layer in channels]
    layers = range(engine.num_layers)
    chooser = SparqChooser(
        engine,
        view.middle,
        [bits[i % num_wide] for i in layers],
        [sums[i % num_wide] for i in layers],
        engine.head_dim // COMPONENT_SHARE,
        team,
    )
    return _chosen_on_cpu(work, options, engine, view, chooser, team, round(SLOTS * work.context_len))


RIVALS: dict[str, Callable[[Workload, Options], Prepared]] = {
    "h2o": h2o,
    "magicpig": magicpig,
    "sparq": sparq,
    "pqcache": pqcache,
    "pqcache on the GPU": pqcache_on_device,
}


def _chosen_on_cpu(
    work: Workload,
    options: Options,
    engine: EngineShape,
    view: ContextView,
    chooser: PqChooser | SparqChooser,
    team: Team,
    num_slots: int,
) -> Prepared:
    far = _cached_rows(engine, options, work, num_slots)
    steps = ChosenSteps(engine, far, chooser, work.device)
    _load(work, engine, far, steps)

    def start_counting() -> None:
        far.cache.clear_statistics()
        steps.search_us.clear()

    def facts(num_steps: int) -> dict[str, Any]:
        searched = round(statistics.median(steps.search_us), 1)
        return {**cache_facts(far, work, options, num_steps), "cpu_search_us": searched}

    return Prepared(steps, _step_bytes(work, options, view), facts, start_counting, close=team.close)


def _shape_and_view(work: Workload, options: Options) -> tuple[EngineShape, ContextView]:
    """Like ours with one selection per KV head, by each layer's own query."""
    engine = engine_shape(work, options, None, options.search)
    return engine, ContextView(work.context_len, engine.softmax_scale, options.search)


def _cached_rows(engine: EngineShape, options: Options, work: Workload, num_slots: int) -> CachedRows:
    num_slots = min(num_slots, work.context_len)
    require_memory(
        work.batch_size * engine.num_layers * row_bytes(options.shape) * num_slots, "slot cache on the device"
    )
    return CachedRows(engine, num_slots, work.device)


def _load(work: Workload, engine: EngineShape, far: CachedRows, steps: ChosenSteps | PqOnDeviceSteps) -> None:
    kv = host_rows(work, engine.num_layers)
    for context_id in range(work.batch_size):
        far.load(context_id, kv)
        steps.load(context_id, kv.layers)


def _step_bytes(work: Workload, options: Options, view: ContextView) -> float:
    """What attention reads of the device's memory."""
    resident = work.context_len - (view.middle.stop - view.middle.start)
    rows = view.top_k + resident + TAIL_LEN
    return work.batch_size * options.shape.num_layers * row_bytes(options.shape) * rows


def _require_host(num_bytes: int) -> None:
    if num_bytes > host_memory_bytes():
        raise TooLargeError(f"{num_bytes / 1e9:.1f} GB are needed of {host_memory_bytes() / 1e9:.1f} GB on the host")
