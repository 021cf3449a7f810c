"""Middleware for every request before its body is read (id, API key, sizes), and for every reply."""

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.api.body import MANY_BODIES, ClientGone, Pace, too_large
from workers.api.errors import HttpError, error_reply, failed, own_path
from workers.api.measures import Measures
from workers.api.request_log import log, log_failure, log_request, request_line
from workers.serving.messages import ServingError
from workers.settings import Settings

OPEN_PATHS = {"/health", "/ready", "/"}  # these and static files need no API key
OPEN_PREFIX = "/static/"
ALWAYS_SERVED = {"/health", "/ready"}  # however many requests are open
SCRAPED = "/metrics"  # a scrape does not count itself
LINGER_S = 2.0  # for what a refused client still sends to be read, so that it gets the reply
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
CLIENT_GONE = 499


class Guard:
    """ASGI middleware around the whole application; it answers requests that may not pass or that fail inside."""

    def __init__(self, app: ASGIApp, settings: Settings, measures: Measures, pace: Pace) -> None:
        self._app, self._settings, self._limits, self._measures = app, settings, settings.limits, measures
        self._pace = pace
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _without_host(scope["path"])
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex  # never the client's, of which two may run at once
        state["arrived_at"] = time.monotonic()
        incoming = _Incoming(receive, headers)
        request_id = given if REQUEST_ID.fullmatch(given) else state["request_id"]
        state["reply_id"] = request_id
        outgoing = _Outgoing(send, incoming, request_id, self._limits.stall_timeout_s)
        is_scrape = own_path(scope) == SCRAPED
        self._num_open += 1
        self._measures.in_flight.inc(not is_scrape)
        try:
            status = await self._answer(scope, headers, incoming, outgoing)
        finally:
            self._num_open -= 1
            self._measures.in_flight.dec(not is_scrape)
        self._measures.requests.labels(_route(scope), status).inc()
        if self._settings.server.access_log:
            log_request(scope, status, time.monotonic() - state["arrived_at"])

    async def _answer(self, scope: Scope, headers: Headers, incoming: "_Incoming", outgoing: "_Outgoing") -> int:
        """Pass a request on or refuse it; return the status."""
        try:
            try:
                self._admit(scope, headers)
                await self._app(scope, incoming.receive, outgoing.send)
            except ServingError as error:
                log_failure(scope, error)
                await self._refuse(error, scope, incoming, outgoing)
            except ClientGone:
                raise
            except Exception:
                log.exception("%s failed", request_line(scope))
                await self._refuse(failed(), scope, incoming, outgoing)
        except ClientGone:
            return CLIENT_GONE
        return outgoing.status

    def _admit(self, scope: Scope, headers: Headers) -> None:
        limits, path = self._limits, own_path(scope)
        if self._num_open > limits.max_open_requests and path not in ALWAYS_SERVED:
            raise HttpError(503, "overloaded", "too many requests are open; send it again later")
        header_bytes = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["query_string"])
        if header_bytes + len(scope["path"]) > limits.max_header_bytes:
            raise HttpError(
                431, "header_too_large", f"the header is larger than the limit of {limits.max_header_bytes} bytes"
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            # request smuggling: a proxy that goes by the other one takes what follows for a part of this request
            raise HttpError(
                400, "invalid_request", "the header has Content-Length and Transfer-Encoding; send one of them"
            )
        self._check_host(headers.get("host", ""))
        if path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            self._check_key(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > limits.max_body_bytes):
            raise too_large(limits.max_body_bytes)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")  # the latter from Anthropic's
        if not self._settings.server.admits(given):
            what = "this is not an API key of this service" if given else "an API key is needed"
            raise HttpError(401, "invalid_api_key", f"{what}; send the header 'Authorization: Bearer KEY'")

    def _check_host(self, host: str) -> None:
        """Without API keys, allow this machine's names only: another site's page could reach us by DNS rebinding."""
        server = self._settings.server
        name = (host.rpartition(":")[0] if re.search(r":\d+$", host) else host).lower()
        if not server.api_keys and host and name != server.host.lower() and not _is_this_machine(name.strip("[]")):
            raise HttpError(
                403,
                "wrong_host",
                "without API keys only this machine is answered, by its own name; set server.api_keys",
            )

    async def _refuse(self, error: ServingError, scope: Scope, incoming: "_Incoming", outgoing: "_Outgoing") -> None:
        if outgoing.status:
            return  # the reply has begun: the server breaks it off
        reply = error_reply(error, own_path(scope))
        if incoming.is_complete:
            await reply(scope, incoming.receive, outgoing.send)
            return
        # closing with unread bytes would reset the connection, and the reply might be lost
        await outgoing.send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
        await outgoing.send({"type": "http.response.body", "body": reply.body, "more_body": True})
        if not incoming.expects_continue:
            self._num_open -= 1  # a refused client that lingers, say without a key, takes nobody's place
            try:
                await _drain(incoming.receive, MANY_BODIES * self._limits.max_body_bytes, self._pace)
            finally:
                self._num_open += 1
        await outgoing.send({"type": "http.response.body", "body": b"", "more_body": False})


class _Incoming:
    """The receiving side: records whether the body is complete."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self.is_complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self.expects_continue = "expect" in headers

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.is_complete = True
        return message


class _Outgoing:
    """The sending side: adds the request's id, records the status, and gives up on a client that reads nothing."""

    def __init__(self, send: Send, incoming: _Incoming, request_id: str, stall_timeout_s: float) -> None:
        self._send, self._incoming, self._request_id = send, incoming, request_id
        self._stall_timeout_s = stall_timeout_s
        self.status = 0  # 0: no reply has begun

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = self._request_id  # the latter for Anthropic's clients
            headers["x-content-type-options"] = "nosniff"
            if not self._incoming.is_complete:
                headers["connection"] = "close"  # the rest of the body must not be read as the next request
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(message)
        except OSError:  # includes TimeoutError; caught here only, because the application's own have other causes
            raise ClientGone from None


async def _drain(receive: Receive, most_bytes: int, pace: Pace) -> None:
    """Read and drop what still comes, for at most LINGER_S."""
    try:
        async with asyncio.timeout(LINGER_S):
            while most_bytes > 0:
                message = await receive()
                most_bytes -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                await pace.keep(len(message["body"]))
    except TimeoutError:
        return


def _without_host(path: str) -> str:
    """Return the path of a request target that may be a whole URL, as clients with a proxy in between send it."""
    scheme, is_url, rest = path.partition("://")
    return "/" + rest.partition("/")[2] if is_url and "/" not in scheme else path


def _route(scope: MutableMapping[str, Any]) -> str:
    """Return the route's pattern, so that paths that clients invent make no new time series."""
    return getattr(scope.get("route"), "path", None) or "other"


def _is_this_machine(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
