"""The application under a real server, on a free port, in its own thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from tests.workers.api.fake_backend import FakeBackend
from workers.api import make_app, server_of
from workers.settings import LimitSettings, Secret, ServerSettings, Settings

KEY = "a-key-of-the-tests"


@dataclass
class Running:
    backend: FakeBackend
    settings: Settings
    url: str
    port: int
    server: uvicorn.Server


def settings_with(**limits: Any) -> Settings:
    return Settings(server=ServerSettings(port=0, api_keys=(Secret(KEY),)), limits=LimitSettings(**limits))


@contextmanager
def serving(backend: FakeBackend | None = None, settings: Settings | None = None) -> Iterator[Running]:
    """Run a service with the context `handbook` until the block ends, on a free port whatever the settings say."""
    backend, settings = backend or FakeBackend(), settings or settings_with()
    settings = replace(settings, server=replace(settings.server, port=0))  # other services run at the same time
    backend.add("handbook")
    server = server_of(make_app(backend, settings), settings, log_level="error", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(backend, settings, f"http://127.0.0.1:{port}", port, server)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


def eventually(is_so: Any, timeout_s: float = 10.0) -> bool:
    """Whether `is_so` becomes true in time."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        if is_so():
            return True
        time.sleep(0.005)
    return bool(is_so())
