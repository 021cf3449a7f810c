"""Middleware in Serve's proxy: clients of an ingress replica that dies get an error in the format they expect."""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.api.answering import event_of
from workers.api.errors import HttpError, error_body, error_reply, own_path
from workers.serving.messages import WorkerLostError


def middlewares() -> list[Middleware]:
    """The function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, called by Serve."""
    return [Middleware(StreamGuard)]


class StreamGuard:
    """Completes what the proxy leaves open: an event stream by an error event, a request without a reply by a 503.

    Serve's own paths below /-/ are not part of the service and would be open to everyone: they get a 404.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/-/"):
            await error_reply(HttpError(404, "not_found", "there is nothing at this address"))(scope, receive, send)
            return
        reply = _Reply(send)
        try:
            await self._app(scope, receive, reply.pass_on)
        finally:
            await reply.complete(scope, receive)


class _Reply:
    """Sends one reply on, and records how far it has come."""

    def __init__(self, send: Send) -> None:
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

    async def complete(self, scope: Scope, receive: Receive) -> None:
        lost = "the process that answered this request ended; the request may be sent again"
        error, path = WorkerLostError(lost, retry_after_s=2.0), own_path(scope)
        if not self._is_started:
            await error_reply(error, path)(scope, receive, self._send)
        elif self._is_stream and not self._is_complete:
            event = event_of(error_body(error, path))
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
