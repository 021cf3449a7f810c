"""A client whose ingress replica dies gets an error. The application inside stands in for Serve's proxy."""

import asyncio
import json
from typing import Any

import pytest

from workers.service.stream_guard import StreamGuard, middlewares

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
PLAIN = [(b"content-type", b"text/plain")]


def sent_by(inside: list[Any], path: str = "/v1/models", error: BaseException | None = None) -> list[dict[str, Any]]:
    """Return what the client gets if the application sends these messages, then returns or raises `error`."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in inside:
            await send(message)
        if error is not None:
            raise error

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads the request here")

    asyncio.run(StreamGuard(app)({"type": "http", "path": path}, receive, send))
    return sent


def start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more_body: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more_body}


@pytest.mark.parametrize(
    "reply",
    [
        [start(200, STREAM), body(b"data: a\n\n", True), body(b"data: [DONE]\n\n", True), body(b"")],
        [start(200, STREAM), body(b": wait\n\n", True), body(b"data: a\n\n", True), body(b"")],
        [start(200, JSON), body(b"{}")],
        [start(500, JSON), body(b"{}")],
        [start(404, PLAIN), body(b"no")],
    ],
    ids=["stream", "comment", "object", "the service's own error", "not found"],
)
def test_a_complete_reply_passes_unchanged(reply: list[dict[str, Any]]) -> None:
    assert sent_by(reply) == reply


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    begun = [start(200, STREAM), body(b"data: a\n\n", True)]
    *before, last = sent_by(begun)
    assert before == begun
    assert last["more_body"] is False
    event, rest = last["body"].decode().split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["code"] == "worker_lost" and "sent again" in error["message"]
    assert rest == ""  # and no [DONE]: OpenAI's clients raise at the event


def test_anthropics_clients_get_the_error_in_their_format() -> None:
    *_, last = sent_by([start(200, STREAM), body(b"event: ping\n\n", True)], "/v1/messages")
    name, data = last["body"].decode().rstrip().split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and said["type"] == "error" and said["error"]["type"] == "overloaded_error"
    _, reply = sent_by([], "/v1/messages")
    assert json.loads(reply["body"])["type"] == "error"


def test_a_repeated_x_request_id_header_is_removed() -> None:
    twice = [(b"x-request-id", b"a"), (b"content-type", b"application/json"), (b"X-Request-Id", b"a")]
    begin, _ = sent_by([{"type": "http.response.start", "status": 200, "headers": twice}, body(b"{}")])
    assert begin["headers"] == twice[:2]


@pytest.mark.parametrize(
    "inside", [[], [start(500, PLAIN), body(b"Internal Server Error")], [start(503, PLAIN), body(b"busy")]]
)
def test_a_missing_reply_becomes_503_with_retry_after(inside: list[dict[str, Any]]) -> None:
    begin, end = sent_by(inside)
    headers = dict(begin["headers"])
    assert begin["status"] == 503 and headers[b"retry-after"] == b"2"
    assert int(headers[b"content-length"]) == len(end["body"])
    assert json.loads(end["body"])["error"]["code"] == "worker_lost"


def test_serves_own_paths_return_404() -> None:
    begin, end = sent_by([start(200, JSON), body(b'{"/": "csattn"}')], path="/-/routes")
    assert begin["status"] == 404 and json.loads(end["body"])["error"]["code"] == "not_found"


def test_an_error_of_the_proxy_is_raised() -> None:
    with pytest.raises(RuntimeError):
        sent_by([], error=RuntimeError("of the proxy"))


def test_stream_guard_is_the_only_serve_middleware() -> None:
    [middleware] = middlewares()
    assert middleware.cls is StreamGuard
