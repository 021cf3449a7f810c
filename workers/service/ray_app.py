"""The service on Ray: attention workers as actors, and in front of them a Serve application that takes HTTP requests.

This process owns the actors: they end with it, however it ends. Ray restarts them when they die; what they need is in
the settings, the store and its registry.
"""

import logging
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any
from uuid import uuid4

from csattn.cluster import join
from csattn.cpus import available_cpus
from csattn.errors import ConfigError
from workers.service.addresses import listen, url_of
from workers.service.attention_actor import AttentionActor
from workers.serving.messages import ServingError
from workers.settings import ServerSettings, Settings
from workers.words import last_line

APP = "csattn"
MAX_REQUESTS = 10_000  # concurrent calls of one process; the scheduler decides how many are admitted
DRAIN_S = 10.0  # for requests that still run when the service ends
_ANSWER_TIMEOUT_S = 60.0
_POLL_S = 0.2
_PLACEMENT_TIMEOUT_S = 60.0
_END_TIMEOUT_S = DRAIN_S + 5.0  # for the workers of an ending service to disappear
_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "workers.service.stream_guard.middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # a proxy counts as lost after three missed health checks: after 3 s; by default after 30
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # most of each process' log, which grows with every client that disconnects; by default half a GiB and five backups
    "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # workers use this process' packages; a second environment is not wanted, and slow to make
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # callers learn of a worker's death in 0.2 s; by default in 2 s
    "RAY_timeout_ms_task_wait_for_death_info": "100",
    "RAY_core_worker_internal_heartbeat_ms": "100",
    # Ray's default niceness for workers is 15: beside a busy process, a start takes minutes
    "RAY_worker_niceness": "0",
}


class Stopped(Exception):
    """The service was stopped before it was ready."""


@contextmanager
def service_on_ray(
    settings: Settings, named: Mapping[str, str], port: int, stop_requested: Event
) -> Iterator[tuple[str, str]]:
    """Run the service for the length of the block; yield its URL, once it answers, and a description of its machines.

    named: artifact ids by context name. port: a free one, or the one on which the cluster's Serve listens already.
    stop_requested: set to end the service; if it is set before the service is ready, Stopped is raised. Raises
    ConfigError if Ray is not installed, if the cluster lacks room or runs a csattn service already, if the port is not
    available, or if a worker cannot start, and ContextNotReadyError for an artifact that another model has made.
    """
    with connected(settings) as ray:
        namespace = f"{APP}-{uuid4().hex}"
        _require_only_service(ray, namespace, stop_requested)
        _require_port(settings.server, port)
        names = [f"attention-{number}" for number in range(settings.ray.num_attention_workers)]
        workers: list[tuple[Any, Any]] = []
        try:
            for name in names:
                workers.append(_start_worker(ray, settings, name, namespace))
            for name, (actor, _) in zip(names, workers, strict=True):
                _require_started(ray, name, actor, stop_requested)
            _name(ray, workers[0][0], named)
            nodes = ray.get([actor.node.remote() for actor, _ in workers])
            found = ray.get(
                [
                    actor.describe_machine.remote(nodes.count(node))
                    for (actor, _), node in zip(workers, nodes, strict=True)
                ]
            )
            _require_only_service(ray, namespace, stop_requested)  # another service may have started meanwhile
            try:
                yield _start_ingress(settings, port, names, namespace), _join_descriptions(names, found)
            finally:
                with suppress(Exception):
                    ray.serve.delete(APP)  # running requests may finish within DRAIN_S
        finally:
            _end_workers(ray, workers)


def _require_only_service(ray: Any, namespace: str, stop_requested: Event) -> None:
    """Raise ConfigError if another service runs on the cluster.

    Its application has the same name, and would be replaced, then deleted. A killed service leaves an application
    without workers, which may be replaced. namespace: that of this service's workers. Raises Stopped if
    stop_requested is set.
    """
    until = time.monotonic() + _END_TIMEOUT_S
    while any(
        actor["namespace"].startswith(f"{APP}-") and actor["namespace"] != namespace
        for actor in ray.util.list_named_actors(all_namespaces=True)
    ):
        if time.monotonic() >= until:
            raise ConfigError(
                "a csattn service runs on this Ray cluster already, and a cluster can have only one; end it first, "
                "or leave ray.address out to start a new cluster for this one"
            )
        if stop_requested.wait(_POLL_S):
            raise Stopped


def _require_port(server: ServerSettings, port: int) -> None:
    """Raise ConfigError if Serve cannot listen on the port. A running Serve keeps its own; at another port, another
    program might answer."""
    from ray.serve.context import _get_global_client

    serve = _get_global_client(raise_if_no_controller_running=False)
    if serve is None:
        listen(server).close()
    elif serve.http_config.port != port:
        raise ConfigError(
            f"Ray Serve listens on port {serve.http_config.port} on this cluster, not on {port}, and keeps the address "
            "that it was started with: set server.host and server.port to that, or run `serve shutdown` on it first"
        )


def _join_descriptions(names: list[str], found: list[str]) -> str:
    """Join the descriptions. Those of workers on one machine differ only in the memory that others take meanwhile."""
    return found[0] if len(names) == 1 else "; ".join(map(": ".join, zip(names, found, strict=True)))


def _start_worker(ray: Any, settings: Settings, name: str, namespace: str) -> tuple[Any, Any]:
    """Start an attention worker; return its actor, which may still be starting, and its placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    room = reserve_room(ray, settings, name)
    own = room.bundle_specs[0]
    options = ray.remote(AttentionActor).options(
        name=name,
        namespace=namespace,
        num_cpus=own["CPU"],
        num_gpus=own.get("GPU", 0),
        max_restarts=-1,
        max_task_retries=0,  # a request that has sent tokens must not run again
        max_concurrency=MAX_REQUESTS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=0),
        runtime_env={"env_vars": worker_environment(settings)},
    )
    return options.remote(settings), room


def _require_started(ray: Any, name: str, actor: Any, stop_requested: Event) -> None:
    """Wait until the worker has loaded what it needs. Raises ConfigError if it cannot start, or Stopped."""
    answer = actor.failure.remote()
    while not stop_requested.is_set() and not ray.wait([answer], timeout=_POLL_S)[0]:
        pass
    if stop_requested.is_set():
        raise Stopped
    try:
        failure = ray.get(answer)
    except ray.exceptions.RayError as error:
        failure = last_line(error)
    if failure is not None:
        raise ConfigError(f"{name} cannot start: {failure}")


def _name(ray: Any, actor: Any, named: Mapping[str, str]) -> None:
    """Name artifacts through one worker: all share the store, and the model that must have made the artifacts."""
    for name, artifact_id in named.items():
        answer = ray.get(actor.call.remote("name", name, artifact_id))
        if isinstance(answer, ServingError):
            raise answer


def _start_ingress(settings: Settings, port: int, names: list[str], namespace: str) -> str:
    """Deploy the HTTP side, and return its URL when it answers."""
    from ray import serve
    from ray.exceptions import RayError

    from workers.service.ray_ingress import Ingress

    quiet = {"log_level": "ERROR", "enable_access_log": False}
    http_options = {"host": settings.server.host, "port": port}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http_options, logging_config=quiet)
    except (RayError, RuntimeError, TimeoutError) as error:
        raise ConfigError(
            f"Ray Serve cannot listen on port {port} of {settings.server.host}: {last_line(error)}; run `serve "
            "shutdown` on the cluster, and name another port with --port"
        ) from error
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.ray.num_ingress_replicas,
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=DRAIN_S,
        logging_config=quiet,
    )
    serve.run(ingress.bind(settings, names, namespace), name=APP, route_prefix="/")
    url = url_of(settings.server.host, port)
    _require_answer(url)
    return url


def _require_answer(url: str) -> None:
    """Wait until the URL answers. Raises ConfigError if it does not: a running Serve keeps its address."""
    until, directly = time.monotonic() + _ANSWER_TIMEOUT_S, urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < until:
        with suppress(OSError), directly.open(f"{url}/health", timeout=2.0):
            return
        time.sleep(_POLL_S)
    raise ConfigError(
        f"nothing answers at {url}; a cluster on which Ray Serve runs keeps the address that it was started with: "
        "set server.host and server.port to that, or run `serve shutdown` on it first"
    )


def _end_workers(ray: Any, workers: list[tuple[Any, Any]]) -> None:
    """Kill the workers; requests that still run fail with WorkerLostError."""
    for actor, room in workers:
        with suppress(Exception):
            ray.kill(actor)
            ray.util.remove_placement_group(room)


@contextmanager
def connected(settings: Settings) -> Iterator[Any]:
    """Yield the module ray, connected to a cluster; a connection made here is closed after the block."""
    # Ray's own ports are open to the network: a cluster started here obeys only holders of this user's token
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
            "`ray start --head`, or leave the setting out to start one on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def bundles(settings: Settings) -> list[dict[str, int]]:
    """Return the resources that an attention worker needs on its node, then those of each of its search workers."""
    own = {"CPU": settings.engine.num_threads or 1}
    if settings.engine.placement != "cpu":
        own["GPU"] = settings.engine.num_devices
    return [own, *({"CPU": 1} for _ in range(settings.engine.num_search_workers))]


def reserve_room(ray: Any, settings: Settings, name: str) -> Any:
    """Return a placement group with those bundles on one node. Raises ConfigError if no node has them free."""
    wanted = bundles(settings)
    room = ray.util.placement_group(wanted, strategy="STRICT_PACK")
    if not room.wait(_PLACEMENT_TIMEOUT_S):
        ray.util.remove_placement_group(room)
        total = {kind: sum(bundle.get(kind, 0) for bundle in wanted) for kind in ("CPU", "GPU")}
        needs = " and ".join(f"{count} {kind}" for kind, count in total.items() if count)
        raise ConfigError(
            f"no node of the cluster has {needs} free for {name}; add one, or ask for fewer workers or threads"
        )
    return room


def worker_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of an attention worker. libgomp reads OMP_* on loading: spinning threads starve others."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if settings.engine.placement == "cpu" else {}
    threads = {"OMP_NUM_THREADS": str(settings.engine.num_threads or available_cpus()), "OMP_WAIT_POLICY": "passive"}
    return {**_ENVIRONMENT, **threads, **hidden}


def _cluster(settings: Settings) -> dict[str, Any]:
    """Return the options of `ray.init`: an existing cluster, or a local one with enough CPUs for the settings."""
    if settings.ray.address is not None:
        return {"address": settings.ray.address, "runtime_env": {"env_vars": _ENVIRONMENT}}
    num_cpus = settings.ray.num_attention_workers * sum(bundle["CPU"] for bundle in bundles(settings))
    return {"address": "local", "num_cpus": max(available_cpus(), num_cpus), "include_dashboard": False}
