"""The attention worker as a Ray actor: one process that owns a device, a model, and the requests that it decodes."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from csattn.errors import CsattnError
from workers.garbage import reduce_gc
from workers.service.log_lines import log_to_stderr
from workers.serving.messages import Ask, Event, Health, ServingError, WorkerLostError, WorkerStatus
from workers.settings import Settings

T = TypeVar("T")
LEASE_S = 5.0  # requests of an ingress without a heartbeat for so long are ended
_log = logging.getLogger(__name__)
_RESTART_S = 5.0  # until a worker that could not start exits and Ray restarts it


class AttentionActor:
    """A backend for callers in other processes. Errors for clients are returned as values: Ray wraps raised ones."""

    def __init__(self, settings: Settings):
        log_to_stderr()
        reduce_gc()
        self._settings = settings
        self._failure: str | None = None
        try:
            # imported here, because only the actor's process needs models and engines
            from workers.service.making import make_backend
            from workers.service.search_actor import SearchActors

            self._backend = make_backend(settings, SearchActors())
        except Exception as error:  # of any kind: Ray never restarts an actor whose constructor raises
            self._failure = str(error)
            if not isinstance(error, CsattnError):
                _log.exception("the attention worker cannot start")
                self._failure = f"{type(error).__name__}: {error}"
            threading.Timer(_RESTART_S, os._exit, [1]).start()  # after an exit, Ray restarts it
        self._starting: asyncio.Task[None] | None = None
        # by the request's key, which the ingress makes: the ingress, and the task that passes the events on
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._heartbeat_s: dict[str, float] = {}  # time of the last heartbeat, by ingress

    async def generate(self, key: str, ingress: str, ask: Ask) -> AsyncGenerator[list[Event | ServingError], None]:
        """Yield events as they come, those that came together in one list. An error is the last of them."""
        events: asyncio.Queue[Event | ServingError | None] = asyncio.Queue()  # None: that is all
        self._heartbeat_s[ingress] = time.monotonic()
        self._running[key] = ingress, asyncio.create_task(self._pump(ask, events))
        try:
            ready: list[Event | ServingError | None] = []
            while None not in ready:
                ready = [await events.get()]
                while not events.empty():
                    ready.append(events.get_nowait())
                if ready_events := [event for event in ready if event is not None]:
                    yield ready_events
        finally:
            self._end(key)

    async def end(self, key: str) -> None:
        """Cancel that request: nobody waits for the rest of it."""
        self._end(key)

    async def heartbeat(self, ingress: str) -> WorkerStatus | ServingError:
        """Take a heartbeat of that ingress; return this worker's load and loaded contexts."""
        self._heartbeat_s[ingress] = time.monotonic()

        async def status() -> WorkerStatus:
            return self._backend.status()

        return await self._result_or_error("a heartbeat", status)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the backend; return its result, or the ServingError that it raised."""
        return await self._result_or_error(f"the call {method}", lambda: getattr(self._backend, method)(*arguments))

    async def health(self) -> Health | ServingError:
        if self._failure is not None:
            return Health(False, self._failure)
        return await self._result_or_error("the call health", self._backend.health)

    async def failure(self) -> str | None:
        """Why the worker could not start; None if it has. While it is starting, this does not answer."""
        return self._failure

    async def node(self) -> str:
        """The id of the cluster's node that it is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def describe_machine(self, num_workers: int) -> str:
        """Describe its machine, which num_workers workers share."""
        from workers.service.machine import describe_machine

        return await asyncio.to_thread(describe_machine, self._settings, self._backend.loaded, num_workers)

    async def _result_or_error(self, name: str, answer: Callable[[], Awaitable[T]]) -> T | ServingError:
        """Return the answer, or why there is none. name: for the log."""
        try:
            await self._start()
            return await answer()
        except ServingError as error:
            return error
        except Exception as error:  # a bug: raised, Ray would report it as the worker's end
            _log.exception("%s failed", name)
            what = "the attention worker failed at this request"
            return ServingError(f"{what}; its log says why", detail=f"{what} ({error!r})")

    async def _start(self) -> None:
        """Start the backend at the first call, when an event loop exists; after a failure, again at the next.

        Raises WorkerLostError if the constructor failed and a restart is pending: another worker may take the request.
        """
        if self._failure is not None:
            raise WorkerLostError(
                "the attention worker could not start and is being started again; send the request again",
                None,
                _RESTART_S,
                f"the attention worker cannot start: {self._failure}",
            )
        if self._starting is None:
            self._watch = asyncio.create_task(self._end_orphans())
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._backend.start())
        await asyncio.shield(self._starting)

    async def _pump(self, ask: Ask, events: "asyncio.Queue[Event | ServingError | None]") -> None:
        async def pass_on() -> None:
            async with aclosing(self._backend.generate(ask)) as source:
                async for event in source:
                    events.put_nowait(event)

        try:
            if (error := await self._result_or_error(f"the request {ask.request_id}", pass_on)) is not None:
                events.put_nowait(error)
        finally:
            events.put_nowait(None)

    def _end(self, key: str) -> None:
        if key in self._running:
            self._running.pop(key)[1].cancel()

    async def _end_orphans(self) -> None:
        """End the requests of ingresses without a heartbeat: one that was killed cannot cancel them.

        Time during which this process stood still does not count: it could not receive any.
        """
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(LEASE_S / 4)
            now = time.monotonic()
            late_s = now - slept_at - LEASE_S / 4
            beats = {ingress: min(now, at_s + late_s) for ingress, at_s in self._heartbeat_s.items()}
            self._heartbeat_s = {ingress: at_s for ingress, at_s in beats.items() if at_s >= now - LEASE_S}
            for key, (ingress, _) in list(self._running.items()):
                if ingress not in self._heartbeat_s:
                    self._end(key)
