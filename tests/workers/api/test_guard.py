"""Hostile and unlucky clients, over raw sockets, are refused in OpenAI's format, in time, and with short replies."""

import errno
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from csattn.errors import ConfigError
from tests.workers.api.fake_backend import FakeBackend, Script
from tests.workers.api.running import KEY, Running, eventually, serving, settings_with
from workers.api import make_app, server
from workers.serving.messages import ContextInfo, Health
from workers.settings import ServerSettings, Settings

LIMITS = {"max_body_bytes": 100_000, "max_header_bytes": 4000, "body_timeout_s": 1.5, "stall_timeout_s": 0.7}
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(settings=settings_with(**LIMITS)) as running:
        yield running


def post(service: Running, path: str = "/v1/completions", **more: Any) -> httpx2.Response:
    reply = httpx2.post(service.url + path, **{"headers": AUTH, "timeout": 10, **more})
    assert len(reply.content) <= 4096
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return reply


def said(connection: socket.socket, timeout_s: float = 5.0) -> bytes:
    """Return all bytes that arrive until the other side closes."""
    connection.settimeout(timeout_s)
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"<reset>")
    return b"".join(parts)


def head(path: str = "/v1/completions", *lines: str) -> bytes:
    fields = ["Host: localhost", f"Authorization: Bearer {KEY}", "Content-Type: application/json", *lines]
    return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/status", "/metrics", "/version", "/v1/contexts/x", "/nothing"])
def test_endpoints_other_than_health_and_page_require_a_key(service: Running, path: str) -> None:
    for headers in (
        {}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": b"Bearer \xff\xfe"},
    ):  # fmt: skip
        reply = httpx2.get(service.url + path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx2.get(service.url + path, headers=AUTH).status_code != 401


def test_an_app_whose_api_key_file_was_not_read_is_refused(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(api_key_file=tmp_path / "keys"))
    with pytest.raises(ConfigError, match="its keys were not read"):
        make_app(FakeBackend(), settings)


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/static/page.js"])
def test_health_and_page_need_no_key(service: Running, path: str) -> None:
    assert httpx2.get(service.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/static/page.js", "/v1/models", "/v1/contexts/none"])
def test_head_replies_like_get_without_a_body(service: Running, path: str) -> None:
    with httpx2.Client(base_url=service.url, headers=AUTH) as client:
        got, headed = client.get(path), client.head(path)
        assert (headed.status_code, headed.content) == (got.status_code, b"")
        assert headed.headers["content-length"] == got.headers["content-length"] != "0"
        assert headed.headers["content-type"] == got.headers["content-type"]
        assert client.get("/health").json() == {"status": "ok"}, "the connection is not out of step"


def test_head_returns_401_without_a_key_and_503_when_not_ready(service: Running) -> None:
    assert httpx2.head(service.url + "/v1/models").status_code == 401
    service.backend.health_now = Health(False, "not yet")
    try:
        assert (reply := httpx2.head(service.url + "/ready")).status_code == 503 and not reply.content
    finally:
        service.backend.health_now = Health(True)


def test_without_api_keys_only_loopback_hosts_are_answered() -> None:
    with serving(settings=Settings()) as service:
        for host, status in (
            ("localhost", 200), (f"127.0.0.1:{service.port}", 200), ("[::1]:80", 200), ("evil.example", 403),
            ("chat.localhost:8000", 200), ("chatlocalhost", 403),
            ("LocalHost", 200), ("LOCALHOST:80", 200),
            ("evil.example:80", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
        ):  # fmt: skip
            reply = httpx2.get(f"{service.url}/v1/models", headers={"Host": host})
            assert reply.status_code == status, host


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/static/../app.py", 404),
        ("GET", "/static/..%2fapp.py", 404),
        ("GET", "/static/index.html", 404),
        ("GET", "/health/", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/docs", 404),
        ("POST", "/health", 405),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/contexts", 405),
        ("BREW", "/v1/contexts", 405),
    ],
)
def test_unknown_paths_and_methods_return_404_or_405(service: Running, method: str, path: str, status: int) -> None:
    reply = httpx2.request(method, service.url + path, headers=AUTH)
    assert reply.status_code == status and reply.json()["error"]["type"].endswith("_error")
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/contexts", "GET, HEAD, POST"), ("/v1/contexts/handbook", "DELETE, GET, HEAD")]
)
def test_a_refused_method_is_told_all_methods_of_its_address(service: Running, path: str, methods: str) -> None:
    reply = httpx2.patch(service.url + path, headers=AUTH)
    assert reply.headers["allow"] == methods
    assert reply.json()["error"]["message"] == f"this address does not support PATCH; wanted {methods}"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "OpenAI's API is below /v1"),
        ("/v1/v1/chat/completions", "a client's base_url ends with /v1 once"),
    ],
)
def test_a_path_with_the_wrong_beginning_is_refused_with_a_hint(service: Running, path: str, hint: str) -> None:
    reply = httpx2.post(service.url + path, headers=AUTH, json={})
    assert f'nothing at "{path}"; {hint}' in reply.json()["error"]["message"]


def test_x_request_id_is_echoed_or_replaced_if_invalid(service: Running) -> None:
    assert httpx2.get(f"{service.url}/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a" * 129, "a b", "<x>", "\u00e9".encode()):
        own = httpx2.get(f"{service.url}/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(own) == 32
    refused = httpx2.get(f"{service.url}/v1/models", headers={"X-Request-Id": "mine-2"})
    assert refused.status_code == 401 and refused.headers["x-request-id"] == "mine-2"
    body = {"model": "smollm2-135m@handbook", "prompt": "x"}
    for _ in range(2):
        post(service, json=body, headers={**AUTH, "X-Request-Id": "same"})
    assert service.backend.asks[-1].request_id != service.backend.asks[-2].request_id


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[]", "application/json; charset=utf-8", 400),
        (b"3", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"a=1", "application/x-www-form-urlencoded", 415),
        (b"{}", "", 415),
        (b"\xff", "application/json", 400),
        (b"[" * 90_000, "application/json", 400),
        (b'{"model": "' + b"x" * 90_000 + b'", "prompt": "x"}', "application/json", 400),
        (b'{"' + b"x" * 90_000 + b'": 1, "model": "m", "prompt": "x"}', "application/json", 400),
        (b'{"model": "\\u0000\\u0001\xe2\x80\xae' + b"\\u0007" * 200 + b'", "prompt": "x"}', "application/json", 404),
    ],
)
def test_invalid_bodies_and_content_types_return_400_404_or_415(
    service: Running, content: bytes, kind: str, status: int
) -> None:
    assert post(service, content=content, headers={**AUTH, "Content-Type": kind}).status_code == status


def test_a_compressed_body_returns_415_with_the_reason(service: Running) -> None:
    headers = {**AUTH, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = post(service, content=gzip.compress(b"{}"), headers=headers)
    assert reply.status_code == 415
    assert 'Content-Encoding is "gzip": compressed bodies are not read' in reply.json()["error"]["message"]


def test_a_large_body_returns_413_without_being_read(service: Running) -> None:
    assert post(service, json={"x": "y" * 200_000}).status_code == 413
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head("/v1/contexts", "Content-Length: 99999999999999999999"))
        assert b" 413 " in said(connection)
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head("/v1/contexts", "Content-Length: 5000000", "Expect: 100-continue"))
        reply = said(connection)
        assert reply.startswith(b"HTTP/1.1 413 ") and b"connection: close" in reply


def test_a_413_reaches_a_client_that_sends_its_whole_body_before_reading(service: Running) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head("/v1/contexts", "Content-Length: 600000"))
        for _ in range(6):
            connection.sendall(b"x" * 100_000)  # fails once the other side has closed
            time.sleep(0.1)
        assert said(connection).startswith(b"HTTP/1.1 413 ")


def test_a_large_chunked_body_returns_413_before_it_is_complete(service: Running) -> None:
    pieces = iter([b"x" * 50_000] * 200)
    num_sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_sent
        for piece in pieces:
            num_sent += 1
            yield piece

    reply = post(service, content=chunks(), headers={**AUTH, "Content-Type": "application/json"})
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
    assert num_sent < 200  # the body was not read to its end


def test_an_endless_chunked_body_is_cut_off(service: Running) -> None:
    started_at = time.monotonic()
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head("/v1/contexts", "Transfer-Encoding: chunked"))
        with suppress(OSError):
            while time.monotonic() < started_at + 10:
                connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
    assert time.monotonic() < started_at + 8


def test_a_trickling_body_returns_408(service: Running) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        started_at = time.monotonic()
        connection.sendall(head("/v1/completions", "Content-Length: 1000"))
        for _ in range(6):
            connection.sendall(b"x")
            time.sleep(0.3)
        reply = said(connection)
    assert b" 408 " in reply and b'"body_timeout"' in reply
    assert time.monotonic() - started_at < 4.5


def test_a_stalled_body_returns_408() -> None:
    patient = {**LIMITS, "body_timeout_s": 60.0}  # long enough that the stall is noticed first
    with (
        serving(settings=settings_with(**patient)) as service,
        socket.create_connection(("127.0.0.1", service.port)) as connection,
    ):
        connection.sendall(head("/v1/completions", "Content-Length: 1000") + b"{")
        connection.settimeout(20)
        assert b" 408 " in connection.recv(4096)


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://localhost/v1/models", b"200"), ("http://localhost", b"200"), ("/v1/http://localhost/v1/models", b"404")],
)
def test_a_request_target_may_be_a_whole_url(service: Running, target: str, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head(target, "Connection: close").replace(b"POST", b"GET"))
        assert said(connection).split()[1] == status


def test_a_connection_with_an_incomplete_header_is_closed(service: Running) -> None:
    for begin in (b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"):
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(begin)
            started_at = time.monotonic()
            said(connection)
            assert 0.5 < time.monotonic() - started_at < 4.5


@pytest.mark.parametrize(("num_bytes", "status"), [(4000, b"200"), (4001, b"431")])
def test_a_header_of_the_limits_size_is_read(service: Running, num_bytes: int, status: bytes) -> None:
    filler = "x" * (num_bytes - len("/healthhostlocalhostx"))
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: localhost\r\nX: {filler}\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("num_bytes", "status"), [(100_000, 400), (100_001, 413)])
def test_a_body_of_the_limits_size_is_read(service: Running, num_bytes: int, status: int, is_chunked: bool) -> None:
    body = b"x" * num_bytes
    content = iter([body]) if is_chunked else body
    assert post(service, content=content, headers={**AUTH, "Content-Type": "application/json"}).status_code == status


def test_a_large_header_returns_431(service: Running) -> None:
    reply = httpx2.get(f"{service.url}/health", headers={"X-Large": "x" * 3990})
    assert reply.status_code == 431 and reply.json()["error"]["code"] == "header_too_large"
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Large: " + b"x" * 60_000)
        assert b" 200 " not in said(connection)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 999])
def test_bytes_that_are_not_http_are_refused(service: Running, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(garbage + b"\r\n\r\n")
        assert len(said(connection)) < 4096
    assert httpx2.get(f"{service.url}/health").status_code == 200


def test_a_400_keeps_the_connection_open_once_the_body_is_read(service: Running) -> None:
    with httpx2.Client(base_url=service.url, headers=AUTH) as http:
        for _ in range(3):
            reply = http.post("/v1/completions", json={"model": "x"})
            assert reply.status_code == 400 and reply.headers.get("connection") != "close"


def test_too_many_open_requests_return_503_while_health_answers() -> None:
    backend = FakeBackend(scripts={"slow": Script(first_after_s=30.0)})
    with serving(backend, settings_with(max_open_requests=2)) as service:
        body = json.dumps({"model": "smollm2-135m@handbook", "prompt": "slow"}).encode()
        waiting = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(2)]
        for connection in waiting:
            connection.sendall(head("/v1/completions", f"Content-Length: {len(body)}") + body)
        assert eventually(lambda: len(backend.running) == 2)
        reply = httpx2.get(f"{service.url}/v1/models", headers=AUTH)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert httpx2.get(f"{service.url}/health").status_code == 200
        for connection in waiting:
            connection.close()
        assert eventually(lambda: httpx2.get(f"{service.url}/v1/models", headers=AUTH).status_code == 200)


def test_clients_refused_with_401_do_not_count_as_open_requests() -> None:
    """The refused clients stay connected and never send the bodies that they announced."""
    with serving(settings=settings_with(max_open_requests=2)) as service, ExitStack() as opened:
        for _ in range(4):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        assert httpx2.get(f"{service.url}/v1/models", headers=AUTH).status_code == 200


def test_content_length_with_chunked_encoding_is_refused_without_reading_on(service: Running) -> None:
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 5", "Transfer-Encoding: chunked") + hidden)
        told = said(connection)
    assert told.startswith(b"HTTP/1.1 400") and b"send one of them" in told and told.count(b"HTTP/1.1") == 1


def test_connections_are_limited_to_half_of_the_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they took all file descriptors of the process, accepted requests would fail, and each turn of the event loop
    would log thousands of lines."""
    given = []
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (4, 10))
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, most: given.append(most))
    with serving() as service, ExitStack() as opened:
        assert given == [(10, 10)]
        first, *_, last = [
            opened.enter_context(socket.create_connection(("127.0.0.1", service.port))) for _ in range(6)
        ]
        assert said(last) in (b"", b"<reset>")
        first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("soft", "hard", "most_given", "want"),
    [(256, -1, 10240, 5120), (-1, -1, -1, sys.maxsize // 2), (256, -1, -1, sys.maxsize // 2), (256, 512, 256, 128)],
    ids=["macOS", "no limit", "none but one's own", "no more is given"],
)
def test_most_connections_follow_each_systems_descriptor_limits(soft, hard, most_given, want, monkeypatch) -> None:
    def give(_: int, limits: tuple[int, int]) -> None:
        if most_given != -1 and not 0 <= limits[0] <= most_given:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(server.resource, "setrlimit", give)
    assert server._most_connections() == want


def test_request_bodies_beyond_their_total_memory_return_503() -> None:
    with serving(settings=settings_with(max_body_bytes=50_000)) as service, ExitStack() as opened:
        replies = []
        for number in range(9):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            connection.sendall(head("/v1/contexts", "Content-Length: 50000") + b"x" * 49_000)
            connection.settimeout(0.3 if number < 8 else 20)
            with suppress(TimeoutError):
                replies.append(connection.recv(4096))
        assert len(replies) == 1 and b" 503 " in replies[0] and b"retry-after: 1" in replies[0]


def test_parsing_eight_megabytes_of_json_does_not_delay_health() -> None:
    body = b'{"model": "m", "prompt": ["' + b"\\u00e9" * 500_000 + b'", ' + b"[]," * 1_600_000 + b"1]}"
    headers = {**AUTH, "Content-Type": "application/json"}
    with serving() as service, httpx2.Client(base_url=service.url, timeout=20) as http, ThreadPoolExecutor(1) as other:

        def slowest_health_s() -> float:
            reply = other.submit(post, service, content=body, headers=headers)
            slowest_s = 0.0
            while not reply.done():
                started_at = time.monotonic()
                assert http.get("/health").status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - started_at)
            assert reply.result().status_code == 400
            return slowest_s

        # building the whole body would exceed this every time, however idle the machine
        assert any(slowest_health_s() < 0.25 for _ in range(5))


def test_a_disk_error_returns_500_and_is_not_counted_as_a_disconnect(caplog: pytest.LogCaptureFixture) -> None:
    fault = OSError(errno.EIO, os.strerror(errno.EIO))

    class Broken(FakeBackend):
        async def contexts(self, name: str | None = None) -> list[ContextInfo]:
            raise fault

    with serving(Broken(scripts={"x": Script(fail_at=0, error=fault)})) as service:
        replies = [httpx2.get(f"{service.url}/v1/models", headers=AUTH)]
        for stream in (False, True):
            replies.append(post(service, json={"model": "smollm2-135m@handbook", "prompt": "x", "stream": stream}))
        metrics = httpx2.get(f"{service.url}/metrics", headers=AUTH).text
    for reply in replies:
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"
    assert 'route="/v1/models",status="500"' in metrics and 'status="499"' not in metrics
    assert caplog.text.count("Traceback") == 3 and "Input/output error" in caplog.text


def test_http_metrics_are_labelled_by_route_pattern(service: Running) -> None:
    for path in ("/v1/contexts/a", "/v1/contexts/b", "/no/1", "/no/2"):
        httpx2.get(service.url + path, headers=AUTH)
    text = httpx2.get(f"{service.url}/metrics", headers=AUTH).text
    assert 'route="/v1/contexts/{name}",status="404"' in text
    assert 'route="other",status="404"' in text and "/no/1" not in text
    assert "csattn_running_requests 0" in text


FEW_FILES = """
import asyncio, resource
from tests.workers.api.fake_backend import FakeBackend
from tests.workers.api.running import settings_with
from workers.api import make_app, server_of

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    settings = settings_with()
    server = server_of(make_app(FakeBackend(), settings), settings, log_level="error")
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving

asyncio.run(main())  # asyncio's own loop, as in a service without Ray
"""


def test_more_connections_at_once_than_files_are_closed_without_a_traceback_for_each(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", FEW_FILES]
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        ExitStack() as opened,
    ):
        opened.callback(process.kill)
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        for _ in range(400):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        process.send_signal(signal.SIGCONT)
        last = opened.enter_context(socket.create_connection(address))
        last.settimeout(30)
        with suppress(ConnectionError):  # it may be one too many, too
            last.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            last.recv(1)
    assert not log.read_text()
