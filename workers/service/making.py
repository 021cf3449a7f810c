"""Make what the settings describe: a model, an engine for it, and the backend that decodes with both."""

from concurrent.futures import ThreadPoolExecutor

import torch

from csattn.config import preset
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from csattn.models import LoadedModel, load_model
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import DTYPES, read_config
from csattn.models.prompt import shortest_context
from csattn.selectors import resolve_rest
from workers.capacity import context_bytes, require_room_for_weights, spec_of
from workers.engine.cpu.engine import GROWTH, QUESTION_ROWS, CpuEngine
from workers.engine.gpu.engine import MAX_ROWS, step_sizes
from workers.engine.gpu.memory import require_weights
from workers.engine.gpu.sparse_or_full import require_both, require_model
from workers.engine.opening import gpu_engine, require_together
from workers.model.devices import require_device, require_devices
from workers.searchers.supervisor import Launch
from workers.searchers.worker import choose_cpus
from workers.searchers.worker_searcher import WorkerSearcher
from workers.serving.local import LocalBackend
from workers.serving.step_engine import StepEngine
from workers.settings import Settings

# rows that a GPU's largest step has at least: with few requests too, questions are read in pieces of this size
QUESTION_ROWS_ON_GPU = 16


def make_backend(settings: Settings, launch: Launch) -> LocalBackend:
    """Load the model, which takes seconds, and make its backend. Raises CsattnError for settings that cannot be met.

    launch: starts a search worker, if the settings have any.
    """
    _require_engine(settings)
    if settings.engine.placement != "cpu" and settings.engine.num_devices == 1:
        require_weights(settings.model.name, settings.build.dtype, settings.model.weights, settings.engine.placement)
    require_room_for_weights(settings.model.name, settings.build.dtype, settings.model.weights)
    torch.set_num_threads(settings.engine.num_threads or available_cpus())
    with ThreadPoolExecutor(1) as pool:  # search workers start while the model is loaded
        starting = pool.submit(make_searcher, settings, launch)
        try:
            loaded = load_model(settings.model.name, settings.build.dtype, weights=settings.model.weights)
        except BaseException:
            if (searcher := starting.result()) is not None:
                searcher.close()
            raise
    return LocalBackend(make_engine(settings, loaded, starting.result()), loaded, settings)


def make_searcher(settings: Settings, launch: Launch) -> WorkerSearcher | None:
    """Start the configured search workers and connect to them. Returns None if there are none, and threads search."""
    engine, num_workers = settings.engine, settings.engine.num_search_workers
    if not num_workers:
        return None
    threads_each = max(1, (engine.num_threads or available_cpus()) // num_workers)
    # several attention workers on one machine would choose the same CPUs
    cpus = choose_cpus(num_workers * threads_each) if settings.ray.num_attention_workers == 1 else None
    return WorkerSearcher(num_workers, threads_per_worker=threads_each, cpus=cpus, launch=launch)


def make_engine(settings: Settings, loaded: LoadedModel, searcher: WorkerSearcher | None) -> StepEngine:
    """Make the engine of the configured placement. searcher: None: the engine's own threads search."""
    engine, num_requests = settings.engine, settings.limits.max_concurrent_requests
    if engine.placement != "cpu":
        return gpu_engine(
            loaded,
            settings.search,
            engine.placement,
            engine.num_devices,
            batch_sizes=step_sizes(min(max(num_requests, QUESTION_ROWS_ON_GPU), MAX_ROWS)),
            max_requests=num_requests,
            tail_capacity=engine.tail_capacity,
            num_contexts=engine.num_contexts,
            max_context_len=engine.max_context_len,
            index_config=preset(settings.build.preset),
            slot_share=engine.slot_share,
            all_where_faster=engine.all_where_faster,
            selector=engine.selector,
            kv_format=engine.kv_format,
            num_threads=engine.num_threads,
            searcher=searcher,
        )
    return CpuEngine(
        loaded,
        max_rows=min(max(num_requests, QUESTION_ROWS), GROWTH.least_near),
        max_requests=num_requests,
        tail_capacity=engine.tail_capacity,
        num_threads=engine.num_threads,
        searcher=searcher,
        kv_format=engine.kv_format,
    )


def _require_engine(settings: Settings) -> None:
    """Raise ConfigError for engine settings that cannot be met, before anything is loaded."""
    engine = settings.engine
    require_together(engine.placement, engine.selector, None, engine.num_devices, engine.kv_format)
    resolve_rest(settings.search, engine.selector, preset(settings.build.preset).layout)
    if engine.all_where_faster:
        require_both(engine.placement, engine.selector, settings.search, engine.kv_format)
        require_model(describe(read_config(settings.model.name, settings.build.dtype)), DTYPES[settings.build.dtype])
    if engine.context_bytes is not None:
        _require_room_for_one(settings, engine.context_bytes)
    if engine.placement == "cpu":
        return
    require_device()
    if engine.num_devices > 1:
        require_devices(engine.num_devices)
    if engine.num_search_workers and (engine.placement != "host" or engine.selector == "full"):
        searches = "nothing is searched" if engine.selector == "full" else "the GPU searches"
        raise ConfigError(
            f"engine.num_search_workers is {engine.num_search_workers}, engine.placement {engine.placement} and "
            f"engine.selector {engine.selector}, where {searches}; search workers are for the placements cpu and host"
        )
    if engine.num_search_workers and engine.num_devices > 1:
        raise ConfigError(
            f"engine.num_search_workers is {engine.num_search_workers}, engine.num_devices {engine.num_devices}: "
            "search workers support only one GPU; leave them out, and threads of each GPU's process search"
        )


def _require_room_for_one(settings: Settings, most_bytes: int) -> None:
    """Raise ConfigError if there is no room for any context, not even the shortest."""
    build, geometry = settings.build, geometry_of(describe(read_config(settings.model.name, settings.build.dtype)))
    spec = spec_of(geometry, shortest_context(preset(build.preset)), build.dtype, build.preset)
    least = sum(context_bytes(spec, settings.engine.kv_format))
    if most_bytes < least:
        raise ConfigError(
            f"engine.context_bytes is {most_bytes:,}, and a context of this model takes at least {least:,} bytes when "
            f"it is loaded ({spec.context_len} tokens); set it to what your contexts take, or leave it out"
        )
