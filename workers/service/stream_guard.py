"""Middleware in Serve's proxy: clients of an ingress replica that dies get an error in the format they expect."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from workers.serving.messages import WorkerLostError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

_LOST = "the process that answered this request ended; the request may be sent again"
_RETRY_AFTER_S = 2


def middlewares() -> list[Middleware]:
    """The function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, called by Serve."""
    return [Middleware(StreamGuard)]


class StreamGuard:
    """Completes what the proxy leaves open: an event stream by an error event, a request without a reply by a 503.

    Serve's own paths below /-/ are not part of the service and would be open to everyone: they get a 404.
    """

    def __init__(self, app: Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/-/"):
            await _answer(send, 404, {"message": "there is nothing at this address", "code": "not_found"})
            return
        reply = _Reply(send)
        try:
            await self._app(scope, receive, reply.pass_on)
        finally:
            await reply.complete()


class _Reply:
    """Sends one reply on, and records how far it has come."""

    def __init__(self, send: Send):
        self._send = send
        self._is_started = self._is_complete = self._is_stream = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            if message["status"] >= 500 and not kind.startswith(b"application/json"):
                return  # Serve's own error; `complete` sends ours
            self._is_started, self._is_stream = True, kind.startswith(b"text/event-stream")
            message = {**message, "headers": list(headers.items())}  # each once: Serve also sends a request id
        elif not self._is_started:
            return
        self._is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def complete(self) -> None:
        error = {"message": _LOST, "code": WorkerLostError.code}
        if not self._is_started:
            await _answer(self._send, 503, error)
        elif self._is_stream and not self._is_complete:
            event = f"data: {json.dumps({'error': _openai_error(error)})}\n\n"
            await self._send({"type": "http.response.body", "body": event.encode(), "more_body": False})


async def _answer(send: Send, status: int, error: dict[str, str]) -> None:
    body = json.dumps({"error": _openai_error(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _openai_error(error: dict[str, str]) -> dict[str, str | None]:
    """An error in the format of OpenAI's clients."""
    return {"type": "server_error", "param": None, **error}
