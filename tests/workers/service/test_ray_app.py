"""How the service starts on a Ray cluster, tested with a fake one: conflicts, ports and errors."""

import socket
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")

import ray

from csattn.errors import ConfigError
from workers.cli import serving
from workers.service import ray_app
from workers.service.addresses import url_of
from workers.settings import RaySettings, ServerSettings, Settings


def cluster(*found: list[str]) -> Any:
    """A fake `ray`: each look finds actors in the next of these lists of namespaces, and then always in the last."""
    left = list(found)

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        names = left.pop(0) if len(left) > 1 else left[0]
        return [{"name": "attention-0", "namespace": name} for name in names]

    return SimpleNamespace(util=SimpleNamespace(list_named_actors=list_named_actors))


def test_starting_is_refused_while_another_service_runs_on_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_app, "_END_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ray_app, "_POLL_S", 0.01)
    with pytest.raises(ConfigError, match="a csattn service runs on this Ray cluster already"):
        ray_app._require_only_service(cluster(["serve", "csattn-0123"]), "csattn-4567", Event())
    ended = cluster(["csattn-0123"], ["csattn-0123"], ["serve", "csattn-4567"])  # one that has just ended, then this
    ray_app._require_only_service(ended, "csattn-4567", Event())
    stop_requested = Event()
    stop_requested.set()
    with pytest.raises(ray_app.Stopped):
        ray_app._require_only_service(cluster(["csattn-0123"]), "csattn-4567", stop_requested)


@pytest.mark.parametrize("begins_beside", [False, True])
def test_a_service_that_failed_to_start_deletes_no_other_service(
    monkeypatch: pytest.MonkeyPatch, begins_beside: bool
) -> None:
    """Of two that start at once, one may wait long for resources, or find the other only once its own workers run."""
    on_cluster, deleted, ended = cluster([], ["csattn-0123"] * begins_beside), list[str](), list[object]()

    def no_ingress(*_: object) -> str:
        raise AssertionError("another service would be replaced")

    def started(*_: object) -> None:
        if not begins_beside:
            raise ConfigError("no room")

    on_cluster.get = lambda answers: answers
    actor = SimpleNamespace(
        node=SimpleNamespace(remote=lambda: "n"), describe_machine=SimpleNamespace(remote=lambda _: "a CPU")
    )
    monkeypatch.setattr(ray_app, "_END_TIMEOUT_S", 0.0)
    monkeypatch.setattr(ray_app, "connected", lambda _: nullcontext(on_cluster))
    monkeypatch.setattr(ray_app, "_require_port", lambda *_: None)
    monkeypatch.setattr(ray_app, "_start_worker", lambda *_: (actor, None))
    monkeypatch.setattr(ray_app, "_require_started", started)
    monkeypatch.setattr(ray_app, "_start_ingress", no_ingress)
    monkeypatch.setattr(ray, "serve", SimpleNamespace(delete=deleted.append), raising=False)
    monkeypatch.setattr(ray_app, "_end_workers", lambda _, workers: ended.extend(workers))
    says = "runs on this Ray cluster already" if begins_beside else "no room"
    with pytest.raises(ConfigError, match=says), ray_app.service_on_ray(Settings(), {}, 8000, Event()):
        pass
    assert len(ended) == 1 and not deleted


def test_a_port_of_another_program_or_another_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the health check and clients' requests would go to that program."""
    context = pytest.importorskip("ray.serve.context")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerSettings(port=port)
        monkeypatch.setattr(context, "_get_global_client", lambda raise_if_no_controller_running: None)
        with pytest.raises(ConfigError, match="is in use; name another"):
            ray_app._require_port(server, port)
        for other in (port, port + 1):
            there = SimpleNamespace(http_config=SimpleNamespace(port=other))
            monkeypatch.setattr(context, "_get_global_client", lambda there=there, **_: there)
            refused = pytest.raises(ConfigError, match=f"Serve listens on port {other} on this cluster, not on {port}")
            with nullcontext() if other == port else refused:
                ray_app._require_port(server, port)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ray::ProxyActor.ready()\n  a trace\nRuntimeError: Failed to bind"),
        TimeoutError("HTTP proxies not available after 60s."),
    ],
)
def test_a_port_that_serve_cannot_bind_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(**options: object) -> None:
        raise error

    monkeypatch.setattr(ray, "serve", SimpleNamespace(start=start), raising=False)
    says = r"cannot listen on port 80 of 127.0.0.1: (RuntimeError: Failed to bind|HTTP proxies not available .*); run"
    with pytest.raises(ConfigError, match=says):
        ray_app._start_ingress(Settings(), 80, ["attention-0"], "csattn-0123")


def test_the_readiness_check_ignores_http_proxy_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A company's HTTP proxy, set in the environment for outside addresses, cannot reach this machine."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setattr(ray_app, "_ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        Thread(target=server.handle_request).start()
        try:
            ray_app._require_answer(url_of("127.0.0.1", server.server_port))
        finally:
            with suppress(OSError):  # ends the wait of handle_request
                socket.create_connection(("127.0.0.1", server.server_port), timeout=0.1).close()


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_a_listening_port_is_accepted_only_on_an_existing_cluster(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """On a cluster whose service has ended, Serve keeps listening."""
    asked = list[int]()

    def service_on_ray(settings: Settings, named: object, port: int, stop_requested: object) -> None:
        asked.append(port)
        raise ray_app.Stopped

    monkeypatch.setattr(ray_app, "service_on_ray", service_on_ray)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(server=ServerSettings(port=port), ray=RaySettings(address=address))
        if address is None:
            with pytest.raises(ConfigError, match="in use"):
                serving._serve_on_ray(settings, {}, lambda url, found: None)
        else:
            serving._serve_on_ray(settings, {}, lambda url, found: None)
    assert asked == [port] * (address is not None)
