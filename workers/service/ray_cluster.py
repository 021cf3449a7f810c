"""Ray as the service uses it: the cluster, what its processes find in their environment, and room for a worker."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from csattn.cluster import join
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from workers.settings import Settings

_PLACING_S = 60.0
_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "workers.service.stream_guard.middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # a proxy that has ended is missed at the third of these: after 3 s; by default after 30
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # of each process' log, which grows with every client that leaves: by default half a GiB, and five more of them
    "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # workers have this process' packages; a second environment is neither wanted nor quick
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # callers of a worker that died hear of it in 0.2 s; by default in 2 s
    "RAY_timeout_ms_task_wait_for_death_info": "100",
    "RAY_core_worker_internal_heartbeat_ms": "100",
    # Ray lets its workers yield to everything else (15): beside a busy process, a start takes minutes
    "RAY_worker_niceness": "0",
}


@contextmanager
def connected(settings: Settings) -> Iterator[Any]:
    """The module ray, connected; what this connected it also parts again."""
    # Ray's own ports are open to the network: a cluster of ours takes orders from who has this user's token alone
    locked = {"RAY_AUTH_MODE": "token"} if settings.ray.address is None else {}
    for variable, value in (_ENVIRONMENT | locked).items():
        os.environ.setdefault(variable, value)
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(
            "serving on Ray needs the package ray[serve], which is not installed; run `pip install 'csattn[serve]'`, "
            "or add --local to serve from this process alone"
        ) from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    try:
        join(ray, settings.ray.address, **_cluster(settings))
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"ray.address is {settings.ray.address!r}, where no Ray cluster can be reached ({reason}); start one with "
            "`ray start --head`, or leave the setting out to have one on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def bundles(settings: Settings) -> list[dict[str, int]]:
    """What an attention worker needs of its node, then what each of its search workers needs there."""
    own = {"CPU": settings.engine.num_threads or 1}
    if settings.engine.placement != "cpu":
        own["GPU"] = settings.engine.num_devices
    return [own, *({"CPU": 1} for _ in range(settings.engine.num_search_workers))]


def keep_room(ray: Any, settings: Settings, name: str) -> Any:
    """A placement group with those bundles on one node. Raises ConfigError where there is no such node."""
    wanted = bundles(settings)
    room = ray.util.placement_group(wanted, strategy="STRICT_PACK")
    if not room.wait(_PLACING_S):
        ray.util.remove_placement_group(room)
        total = {kind: sum(bundle.get(kind, 0) for bundle in wanted) for kind in ("CPU", "GPU")}
        needs = " and ".join(f"{count} {kind}" for kind, count in total.items() if count)
        raise ConfigError(
            f"no node of the cluster has {needs} free for {name}; add one, or ask for fewer workers or threads"
        )
    return room


def worker_environment(settings: Settings) -> dict[str, str]:
    """Of an attention worker. libgomp reads its part when it is loaded: threads that spin would starve others."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if settings.engine.placement == "cpu" else {}
    threads = {"OMP_NUM_THREADS": str(settings.engine.num_threads or available_cpus()), "OMP_WAIT_POLICY": "passive"}
    return {**_ENVIRONMENT, **threads, **hidden}


def _cluster(settings: Settings) -> dict[str, Any]:
    """How it is reached, or started here with room for what is set."""
    if settings.ray.address is not None:
        return {"address": settings.ray.address, "runtime_env": {"env_vars": _ENVIRONMENT}}
    num_cpus = settings.ray.num_attention_workers * sum(bundle["CPU"] for bundle in bundles(settings))
    return {"address": "local", "num_cpus": max(available_cpus(), num_cpus), "include_dashboard": False}
