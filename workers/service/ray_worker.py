"""An attention worker as seen from another process; after a restart by Ray, the new one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError

from workers.serving.messages import Ask, Event, Health, ServingError, WorkerLostError, WorkerStatus

_RETRY_AFTER_S = 5.0  # after which a client may retry while a worker restarts
_ANSWER_S = 30.0  # for anything but tokens, health and heartbeats
_HEALTH_S = 2.0


class RayWorker:
    """Calls an attention worker by the name of its actor. Raises only ServingError."""

    def __init__(self, name: str, namespace: str):
        self.name = name
        self.num_running = 0  # as far as is known here
        self.status: WorkerStatus | None = None  # as last reported; None while the worker does not answer
        self._namespace = namespace
        self._actor: Any = None

    async def generate(self, ingress: str, ask: Ask) -> AsyncGenerator[Event, None]:
        """Yield the events of a request; closing the generator ends the request."""
        key, is_over = uuid4().hex, False
        self.num_running += 1
        try:
            lists = self._method("generate").options(num_returns="streaming").remote(key, ingress, ask)
            async for ref in lists:
                for event in await ref:
                    if isinstance(event, ServingError):
                        is_over = True
                        raise event
                    yield event
            is_over = True
        except RayError as error:
            raise self._lost() from error
        finally:
            self.num_running -= 1
            if not is_over:
                with suppress(RayError, ServingError):
                    self._method("end").remote(key)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker's backend. Raises WorkerLostError if no answer comes."""
        return await self._call_actor("call", method, *arguments)

    async def health(self) -> Health:
        """Return the worker's health; not ready if it does not answer within _HEALTH_S."""
        try:
            health = await self._call_actor("health", timeout_s=_HEALTH_S)
        except ServingError as error:
            return Health(False, error.message)
        assert isinstance(health, Health)
        return health

    async def heartbeat(self, ingress: str) -> None:
        """Send the heartbeat of that ingress, and store the status that the worker reports."""
        try:
            self.status = await self._call_actor("heartbeat", ingress, timeout_s=_HEALTH_S)
        except ServingError:
            self.status = None
        else:
            assert self.status is not None
            self.num_running = self.status.num_running

    async def _call_actor(self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Call a method of the actor itself."""
        try:
            answer = await asyncio.wait_for(self._method(method).remote(*arguments), timeout_s)
        except RayError as error:
            raise self._lost() from error
        except TimeoutError as error:  # it may be busy: heartbeats show whether it is alive
            raise WorkerLostError(
                f"the worker {self.name} has not answered within {timeout_s:g} s; send the request again",
                None,
                _RETRY_AFTER_S,
            ) from error
        if isinstance(answer, ServingError):
            raise answer
        return answer

    def _method(self, name: str) -> Any:
        try:
            self._actor = self._actor or ray.get_actor(self.name, self._namespace)
        except ValueError as error:  # there is no such actor
            raise self._lost() from error
        return getattr(self._actor, name)

    def _lost(self) -> WorkerLostError:
        self.status = None
        return WorkerLostError(
            f"the worker {self.name} ended and is being started again; send the request again", None, _RETRY_AFTER_S
        )
