"""How the service begins on a Ray cluster, without one: what it finds there, and what it says of it."""

import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
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
    """On which so many times actors of these namespaces are found; then the last of them again and again."""
    left = list(found)

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        names = left.pop(0) if len(left) > 1 else left[0]
        return [{"name": "attention-0", "namespace": name} for name in names]

    return SimpleNamespace(util=SimpleNamespace(list_named_actors=list_named_actors))


def test_another_service_of_the_cluster_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_app, "_GONE_S", 0.05)
    monkeypatch.setattr(ray_app, "_POLL_S", 0.01)
    with pytest.raises(ConfigError, match="a csattn service runs on this Ray cluster already"):
        ray_app._require_alone(cluster(["serve", "csattn-0123"]))
    ray_app._require_alone(cluster(["csattn-0123"], ["csattn-0123"], ["serve", "other"]))  # one that has just ended


def test_a_port_that_serve_cannot_have_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: object) -> None:
        raise RuntimeError("ray::ProxyActor.ready()\n  a trace\nRuntimeError: Failed to bind")

    monkeypatch.setattr(ray, "serve", SimpleNamespace(start=start), raising=False)
    with pytest.raises(ConfigError, match=r"cannot listen on port 80 of 127.0.0.1: RuntimeError: Failed to bind; run"):
        ray_app._start_ingress(Settings(), 80, ["attention-0"], "csattn-0123")


def test_its_answer_is_not_asked_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which programs that reach out of a company's network are told of, and which cannot reach this machine."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setattr(ray_app, "_ANSWERING_S", 1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        Thread(target=server.handle_request).start()
        try:
            ray_app._require_answer(url_of("127.0.0.1", server.server_port))
        finally:
            with suppress(OSError):  # so that nobody waits any more
                socket.create_connection(("127.0.0.1", server.server_port), timeout=0.1).close()


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_only_a_cluster_that_is_there_may_listen_at_the_port_already(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """Serve goes on to listen on a cluster whose service has ended."""
    asked = list[int]()

    def service_on_ray(settings: Settings, named: object, port: int, told: object) -> None:
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
