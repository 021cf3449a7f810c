"""One request from its `Ask` to its last byte; a client that disconnects ends it at once."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.api.answers import CompletionForm, used_by
from workers.api.anthropic import MessageForm
from workers.api.body import ClientGone
from workers.api.errors import error_body, failed, own_path
from workers.api.measures import Measures
from workers.api.parsing import ParsedRequest
from workers.api.request_log import log, log_failure, request_line
from workers.api.responses import ParsedResponse, ResponseForm
from workers.serving.backend import Backend
from workers.serving.messages import Ask, Done, Event, Piece, ServingError, TimedOutError, Usage, WorkerLostError
from workers.settings import LimitSettings

T = TypeVar("T")
GRACE_S = 1.0  # beyond a request's timeout: normally the backend ends it in time and counts it; if not, this side does
MAX_QUEUED = 16  # queued events of a request with several answers, besides one in each answer's task
QUIET_S = 2.0  # before a stream's first event: failures get an HTTP status for so long, then keep-alives come as often
KEEP_ALIVE_COMMENT = b": the answer has not begun yet\n\n"  # an SSE comment, which clients skip
BROKEN_OFF = "the answer was interrupted; the request may be sent again"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else proxies would buffer it


class Answering:
    """One request being answered: turns the backend's events into replies, and measures their times."""

    def __init__(
        self,
        backend: Backend,
        parsed: ParsedRequest,
        measures: Measures,
        arrived_at: float,
        limits: LimitSettings,
        is_logged: bool,  # its usage, also if a stream breaks off: every piece then reports it
    ) -> None:
        self._backend, self._parsed, self._measures = backend, parsed, measures
        self._tells_usage = is_logged and parsed.stream
        self.used: dict[str, Usage] = {}  # by request id, each answer's usage so far, if known
        self._arrived_at = arrived_at  # in seconds of time.monotonic()
        self._timeout_s = limits.request_timeout_s
        self._form = _form_of(parsed)

    async def whole(self) -> dict[str, Any]:
        """Return all answers in one object."""
        pieces: list[list[Piece]] = [[] for _ in self._parsed.asks]
        dones: dict[int, Done] = {}
        async with aclosing(self._all_events()) as events:
            async for index, event in events:
                if isinstance(event, Done):
                    dones[index] = event
                else:
                    pieces[index].append(event)
        return self._form.whole(pieces, [dones[index] for index in range(len(pieces))])

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers as a stream's objects. A refusal of the request is raised before the first of them."""
        form, begun = self._form, set()
        async with aclosing(self._all_events()) as events:
            async for index, event in events:
                if index not in begun:
                    begun.add(index)
                    for chunk in form.first(index, event):
                        yield chunk
                for chunk in form.last(index, event) if isinstance(event, Done) else form.piece(index, event):
                    yield chunk

    def failed(self, error: ServingError, path: str) -> dict[str, Any]:
        """Return the object that ends a stream by an error, and count it. path: the request's."""
        self._measures.stream_errors.labels(error.code).inc()
        told = error_body(error, path)
        return self._form.failed(told) if isinstance(self._form, ResponseForm) else told

    async def _all_events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of all answers as they come, with the answer's index. A failed answer ends the others."""
        if len(self._parsed.asks) == 1:
            async with aclosing(self._events(self._parsed.asks[0])) as events:
                async for event in events:
                    yield 0, event
            return
        queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(MAX_QUEUED)  # full: answers wait
        jobs = [asyncio.ensure_future(self._pass_on(i, ask, queue)) for i, ask in enumerate(self._parsed.asks)]
        try:
            num_left = len(jobs)
            while num_left:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= isinstance(item, Done)
                yield index, item
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.wait(jobs)

    async def _pass_on(self, index: int, ask: Ask, queue: "asyncio.Queue[tuple[int, Event | BaseException]]") -> None:
        try:
            async with aclosing(self._events(ask)) as events:
                async for event in events:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    async def _events(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Yield the backend's events up to Done, within the request's timeout; closing this closes the backend's."""
        ends_at = time.monotonic() + self._timeout_s + GRACE_S  # from now on, as the backend counts
        first_at: float | None = None
        if self._tells_usage:
            ask = replace(ask, reports_usage=True)
        async with aclosing(self._backend.generate(ask)) as events:
            while True:
                try:
                    async with asyncio.timeout(ends_at - time.monotonic()):
                        event = await anext(events)
                except TimeoutError:
                    raise TimedOutError(
                        f"the answer was not complete within {self._timeout_s:g} s; ask for fewer tokens"
                    ) from None
                except asyncio.CancelledError:
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        raise
                    raise WorkerLostError(BROKEN_OFF) from None  # what the backend waited for was cancelled
                except StopAsyncIteration:
                    raise WorkerLostError(BROKEN_OFF) from None
                now = time.monotonic()
                if first_at is None:
                    first_at = now
                    self._measures.ttft.observe(now - self._arrived_at)
                if (used := used_by(event)) is not None:
                    self.used[ask.request_id] = used
                if isinstance(event, Done) and event.new_tokens > 1:
                    self._measures.tpot.observe((now - first_at) / (event.new_tokens - 1))
                yield event
                if isinstance(event, Done):
                    return


def _form_of(parsed: ParsedRequest) -> CompletionForm | ResponseForm | MessageForm:
    if isinstance(parsed, ParsedResponse):
        return ResponseForm(parsed)
    return MessageForm(parsed) if parsed.kind == "message" else CompletionForm(parsed)


class EventStream(Response):
    """Server-sent events, named by the `type` of their objects, if any. An error is an event of its own, after which
    the stream closes without its usual end.

    An error within QUIET_S and before the first event is raised: its reply has an HTTP status and is not a stream.
    """

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, end: bytes) -> None:
        """end: sent after the last chunk."""
        self.status_code, self.background = 200, None
        self.init_headers(STREAM_HEADERS)
        self._answering, self._end = answering, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await cancel_if_disconnected(self._send(scope, send), receive)

    async def _send(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._answering.chunks()) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.wait({first}, timeout=QUIET_S)
                if first.done():
                    first.result()
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with aclosing(self._bodies(scope, first, chunks)) as bodies:
                    async for body in bodies:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await _end(first)

    async def _bodies(
        self, scope: Scope, first: "asyncio.Future[dict[str, Any]]", chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield keep-alives until the first chunk is there, then all chunks, then the end."""
        try:
            while not first.done():
                yield KEEP_ALIVE_COMMENT
                await asyncio.wait({first}, timeout=QUIET_S)
            yield event_of(first.result())
            async for chunk in chunks:
                yield event_of(chunk)
        except ServingError as error:
            log_failure(scope, error)
            yield self._broken_off(scope, error)
        except Exception:
            log.exception("%s failed", request_line(scope))
            yield self._broken_off(scope, failed())
        else:
            yield self._end

    def _broken_off(self, scope: Scope, error: ServingError) -> bytes:
        scope["state"]["broken_off"] = error.code
        return event_of(self._answering.failed(error, own_path(scope)))


async def cancel_if_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the work's result. If the client disconnects first, cancel the work, wait for it, and raise ClientGone."""
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGone
        return job.result()
    finally:
        await _end(gone)
        await _end(job)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel the task if it still runs, and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it


def event_of(data: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event."""
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
