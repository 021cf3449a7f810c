"""A client disconnect frees its slot at once, whether the client is receiving or waiting."""

import asyncio
import errno
import json
import os
import socket
import time
from typing import Any

import pytest
from starlette.types import Send

from tests.workers.api.fake_backend import FakeBackend, Script
from tests.workers.api.running import KEY, Running, eventually, serving, settings_with
from workers.api import make_app

MODEL = "smollm2-135m@handbook"


def ask(service: Running, *, stream: bool) -> socket.socket:
    body = json.dumps({"model": MODEL, "prompt": "go", "stream": stream, "max_tokens": 1000}).encode()
    fields = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port))
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "script",
    [
        Script(words=("word ",) * 1000, pause_s=0.01),
        Script(words=("word ",) * 1000, pause_s=30.0),
        Script(first_after_s=30.0),
    ],
    ids=["being sent to", "between pieces", "before the first"],
)
def test_a_client_disconnect_frees_its_slot(script: Script, stream: bool) -> None:
    with serving(FakeBackend(scripts={"go": script})) as service:
        backend = service.backend
        for number in range(1, 6):
            connection = ask(service, stream=stream)
            assert eventually(lambda: len(backend.running) == 1)
            if stream and script.first_after_s == 0:
                assert b"200 OK" in connection.recv(100)
            left_at = time.monotonic()
            connection.close()
            assert eventually(lambda number=number: backend.num_ended_early == number)
            assert backend.ended_early_at[-1] - left_at < 5
            assert not backend.running


def test_a_queued_clients_disconnect_removes_it_from_the_queue() -> None:
    with serving(FakeBackend(max_requests=1, scripts={"go": Script(first_after_s=30.0)})) as service:
        first, second = ask(service, stream=True), None
        assert eventually(lambda: len(service.backend.running) == 1)
        second = ask(service, stream=True)
        assert eventually(lambda: service.backend.num_queued == 1)
        second.close()
        assert eventually(lambda: service.backend.num_queued == 0)
        assert len(service.backend.running) == 1
        first.close()
        assert eventually(lambda: not service.backend.running)


def test_two_hundred_disconnects_free_all_slots() -> None:
    script = Script(words=("word ",) * 1000, pause_s=0.5)
    with serving(FakeBackend(max_requests=200, scripts={"go": script})) as service:
        connections = [ask(service, stream=index % 2 == 0) for index in range(200)]
        assert eventually(lambda: len(service.backend.running) == 200, 20)
        for connection in connections:
            connection.close()
        assert eventually(lambda: service.backend.num_ended_early == 200, 20)
        assert not service.backend.running


def test_a_client_that_stops_reading_is_disconnected() -> None:
    script = Script(words=("word " * 20_000,) * 1000)
    with serving(FakeBackend(scripts={"go": script}), settings_with(stall_timeout_s=0.5)) as service:
        connection = ask(service, stream=True)
        assert eventually(lambda: len(service.backend.running) == 1)
        assert eventually(lambda: service.backend.num_ended_early == 1)
        # unread output does not keep the connection open either
        assert eventually(lambda: not service.server.server_state.connections)
        connection.close()


async def drive(backend: FakeBackend, send: Send, **limits: Any) -> None:
    """Request a stream under an ASGI server with the given `send`."""
    backend.add("handbook")
    body = json.dumps({"model": MODEL, "prompt": "go", "stream": True}).encode()
    headers = {"host": "localhost", "authorization": f"Bearer {KEY}", "content-type": "application/json"}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        message = next(messages, None)
        return message if message is not None else await asyncio.Future()

    await asyncio.wait_for(make_app(backend, settings_with(**limits))(scope, receive, send), 10)


def test_a_send_that_never_returns_times_out_under_any_asgi_server() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Future()

    backend = FakeBackend()
    asyncio.run(drive(backend, send, stall_timeout_s=0.2))
    assert backend.num_ended_early == 1 and not backend.running


def test_a_failed_send_counts_as_a_client_disconnect(caplog: pytest.LogCaptureFixture) -> None:
    async def send(message: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    backend = FakeBackend()
    asyncio.run(drive(backend, send))
    assert backend.num_ended_early == 1 and not backend.running and not caplog.text
