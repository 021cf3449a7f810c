"""Pages of other origins (CORS): preflights, and the header without which a browser hides replies and errors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.workers.api.running import KEY, Running, serving, settings_with

PAGE = "https://chat.example.org"
ALLOWED = "access-control-allow-origin"
BODY = {"model": "smollm2-135m@handbook", "prompt": "x"}


def service_for(*origins: str) -> Any:
    settings = settings_with(max_body_bytes=5000)
    return serving(settings=replace(settings, server=replace(settings.server, allowed_origins=origins)))


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with service_for(PAGE, "http://localhost:3000") as running:
        yield running


def ask_first(service: Running, origin: str, method: str = "POST") -> httpx2.Response:
    wanted = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    return httpx2.options(f"{service.url}/v1/chat/completions", headers={"Origin": origin, **wanted})


def test_preflight_is_allowed_for_configured_origins_only(service: Running) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        reply = ask_first(service, origin)
        assert (reply.status_code, reply.headers[ALLOWED]) == (200, origin)
        assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert ask_first(service, PAGE, "DELETE").status_code == 200
    for reply in (ask_first(service, "https://other.example.org"), ask_first(service, PAGE + ".evil.com")):
        assert reply.status_code == 400 and ALLOWED not in reply.headers


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"json": {**BODY, "stream": True}}, 200),
        ({"json": {"prompt": 5}}, 400),
        ({"headers": {"Authorization": "Bearer wrong"}}, 401),
        ({"content": b"x" * 6000, "json": None}, 413),
    ],
)
def test_every_reply_even_an_error_allows_the_origin(service: Running, changes: dict[str, Any], status: int) -> None:
    options = {"json": BODY, **changes}
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}", **options.pop("headers", {})}
    reply = httpx2.post(f"{service.url}/v1/completions", headers=headers, **options)
    assert (reply.status_code, reply.headers.get(ALLOWED)) == (status, PAGE)
    assert "x-request-id" in reply.headers["access-control-expose-headers"] and reply.headers["x-request-id"]


def test_replies_to_other_origins_have_no_cors_header(service: Running) -> None:
    for headers in ({"Origin": "https://other.example.org"}, {}):
        reply = httpx2.get(f"{service.url}/health", headers=headers)
        assert reply.status_code == 200 and ALLOWED not in reply.headers


def test_wildcard_allows_every_origin_and_no_setting_allows_none() -> None:
    with service_for("*") as service:
        assert ask_first(service, PAGE).headers[ALLOWED] == "*"
        assert httpx2.get(f"{service.url}/health", headers={"Origin": PAGE}).headers[ALLOWED] == "*"
    with service_for() as service:
        reply = ask_first(service, PAGE)
        assert reply.status_code == 401 and ALLOWED not in reply.headers
