"""One request from its `Ask` to its last byte; a client that leaves ends it at once."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.api.answers import Form
from workers.api.asking import Asked
from workers.api.body import ClientGone
from workers.api.errors import error_body, failed
from workers.api.measures import Measures
from workers.serving.backend import Backend
from workers.serving.messages import Done, Event, ServingError, TimedOutError, TokenScore, WorkerLostError

log = logging.getLogger("csattn.api")

T = TypeVar("T")
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies would else gather it


class Answering:
    """One request being answered: its events, timed."""

    def __init__(self, backend: Backend, asked: Asked, measures: Measures, arrived_at: float, timeout_s: float) -> None:
        self._backend, self._asked, self._measures = backend, asked, measures
        self._arrived_at, self._timeout_s = arrived_at, timeout_s  # the first in seconds of time.monotonic()

    async def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        texts: list[str] = []
        scores: list[TokenScore] = []
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, Done):
                    return Form(self._asked).whole("".join(texts), scores, event)
                texts.append(event.text)
                scores += event.scores
        raise AssertionError("events end with Done, or by an error")

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in a stream's objects. What refuses a request is raised before the first of them."""
        form, began = Form(self._asked), False
        async with aclosing(self._events()) as events:
            async for event in events:
                if not began and self._asked.is_chat:
                    yield form.first_chunk()
                began = True
                if isinstance(event, Done):
                    for chunk in form.last_chunks(event):
                        yield chunk
                elif event.text or event.scores:
                    yield form.piece_chunk(event)

    async def _events(self) -> AsyncGenerator[Event, None]:
        """The backend's events up to Done, within the request's time; closing this closes the backend's."""
        ends_at = self._arrived_at + self._timeout_s
        first_at: float | None = None
        async with aclosing(self._backend.generate(self._asked.ask)) as events:
            while True:
                try:
                    async with asyncio.timeout(ends_at - time.monotonic()):
                        event = await anext(events)
                except TimeoutError:
                    raise TimedOutError(
                        f"the answer was not complete within {self._timeout_s:g} s; ask for fewer tokens"
                    ) from None
                except StopAsyncIteration:
                    raise WorkerLostError("the answer broke off; the request may be sent again") from None
                now = time.monotonic()
                if first_at is None:
                    first_at = now
                    self._measures.ttft.observe(now - self._arrived_at)
                if isinstance(event, Done) and event.new_tokens > 1:
                    self._measures.tpot.observe((now - first_at) / (event.new_tokens - 1))
                yield event
                if isinstance(event, Done):
                    return


class EventStream(Response):
    """Server-sent events. An error is an event of its own, after which the stream ends without [DONE].

    What goes wrong before the first event is raised: it has a status, and its reply is not a stream.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], measures: Measures) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(STREAM_HEADERS)
        self._chunks, self._measures = chunks, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            chunk = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b"data: [DONE]\n\n"
            while True:
                await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except ServingError as error:
                    last = self._broken_off(error)
                    break
                except Exception:
                    log.exception("a stream broke off")
                    last = self._broken_off(failed())
                    break
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _broken_off(self, error: ServingError) -> bytes:
        self._measures.stream_errors.labels(error.code).inc()
        return _event(error_body(error))


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The work's result. When the client leaves first, the work is cancelled and waited for, and ClientGone raised."""
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
    """Cancel it if it still runs, and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: it is not reported again


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
