"""The service on Ray: attention workers as actors, and in front of them a Serve application that takes HTTP requests.

This process owns the actors: they end with it, however it ends. Ray starts them again when they die; what they need
is in the settings, the store and its registry.
"""

import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any
from uuid import uuid4

from csattn.errors import ConfigError
from workers.service.addresses import url_of
from workers.service.attention_actor import AttentionActor
from workers.service.ray_cluster import connected, keep_room, worker_environment
from workers.serving.messages import ServingError
from workers.settings import Settings

APP = "csattn"
MAX_REQUESTS = 10_000  # at one process; how many are admitted is decided by the scheduler
DRAIN_S = 10.0  # for requests that still run when the service ends
_ANSWERING_S = 60.0
_POLL_S = 0.2


class Stopped(Exception):
    """The service was told to end before it was ready."""


@contextmanager
def service_on_ray(settings: Settings, named: Mapping[str, str], port: int, told: Event) -> Iterator[tuple[str, str]]:
    """The URL of a service that answers, for as long as the block takes, and what its workers have found.

    named: artifacts by the names that they get. port: one that is free. told: set when the service is to end; if that
    comes before it is ready, Stopped is raised. Raises ConfigError where there is no Ray, no room, or no way for a
    worker to start, and ContextNotReadyError where the model has not made an artifact that gets a name.
    """
    with connected(settings) as ray:
        namespace = f"{APP}-{uuid4().hex}"
        names = [f"attention-{number}" for number in range(settings.ray.num_attention_workers)]
        workers: list[tuple[Any, Any]] = []
        try:
            for name in names:
                workers.append(_start_worker(ray, settings, name, namespace))
            for name, (actor, _) in zip(names, workers, strict=True):
                _require_started(ray, name, actor, told)
            _name(ray, workers[0][0], named)
            nodes = ray.get([actor.node.remote() for actor, _ in workers])
            found = ray.get(
                [actor.found.remote(nodes.count(node)) for (actor, _), node in zip(workers, nodes, strict=True)]
            )
            yield _start_ingress(settings, port, names, namespace), _together(names, found)
        finally:
            _stop(ray, workers)


def _together(names: list[str], found: list[str]) -> str:
    """Workers of one machine find the same, but for the memory that another takes meanwhile."""
    return found[0] if len(names) == 1 else "; ".join(map(": ".join, zip(names, found, strict=True)))


def _start_worker(ray: Any, settings: Settings, name: str, namespace: str) -> tuple[Any, Any]:
    """An attention worker that may still be starting, and the room that is kept for it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    room = keep_room(ray, settings, name)
    own = room.bundle_specs[0]
    options = ray.remote(AttentionActor).options(
        name=name,
        namespace=namespace,
        num_cpus=own["CPU"],
        num_gpus=own.get("GPU", 0),
        max_restarts=-1,
        max_task_retries=0,  # what has sent tokens must not be sent again
        max_concurrency=MAX_REQUESTS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=0),
        runtime_env={"env_vars": worker_environment(settings)},
    )
    return options.remote(settings), room


def _require_started(ray: Any, name: str, actor: Any, told: Event) -> None:
    """Wait until it has loaded what it needs."""
    answer = actor.failure.remote()
    while not told.is_set() and not ray.wait([answer], timeout=_POLL_S)[0]:
        pass
    if told.is_set():
        raise Stopped
    try:
        failure = ray.get(answer)
    except ray.exceptions.RayError as error:
        failure = str(error).strip().splitlines()[-1]
    if failure is not None:
        raise ConfigError(f"{name} cannot start: {failure}")


def _name(ray: Any, actor: Any, named: Mapping[str, str]) -> None:
    """In the store, which all workers see; the model, which has to have made the artifacts, is the same for all."""
    for name, artifact_id in named.items():
        answer = ray.get(actor.call.remote("name", name, artifact_id))
        if isinstance(answer, ServingError):
            raise answer


def _start_ingress(settings: Settings, port: int, names: list[str], namespace: str) -> str:
    """Deploy the HTTP side, and return its URL when it answers."""
    from ray import serve

    from workers.service.ray_ingress import Ingress

    quiet = {"log_level": "ERROR", "enable_access_log": False}
    http_options = {"host": settings.server.host, "port": port}
    serve.start(proxy_location="HeadOnly", http_options=http_options, logging_config=quiet)
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
    """A cluster that serves already does so where it did before, whatever it is asked for now."""
    until = time.monotonic() + _ANSWERING_S
    while time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2.0):
            return
        time.sleep(_POLL_S)
    raise ConfigError(
        f"nothing answers at {url}; a cluster on which Ray Serve runs keeps the address that it was started with: "
        "set server.host and server.port to that, or run `serve shutdown` on it first"
    )


def _stop(ray: Any, workers: list[tuple[Any, Any]]) -> None:
    """Running requests may finish within DRAIN_S; what is left is told that its worker is gone."""
    from ray import serve

    with suppress(Exception):
        serve.delete(APP)
    for actor, room in workers:
        with suppress(Exception):
            ray.kill(actor)
            ray.util.remove_placement_group(room)
