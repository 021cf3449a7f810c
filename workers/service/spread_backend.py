"""A Backend over several attention workers: who gets which request, and what they say together."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any, Protocol
from uuid import uuid4

from prometheus_client import Metric

from workers.service.gathering import join_contexts, join_metrics
from workers.serving.messages import (
    Ask,
    ContextInfo,
    Event,
    Health,
    NewContext,
    OverloadedError,
    ServingError,
    TokenizeAsk,
    Tokens,
    WorkerLostError,
)

BEGINNING = 1024  # characters, or tokens, by which prompts that may share something are known
BEAT_S = 1.0  # how often workers hear that this process lives


class Worker(Protocol):
    """An attention worker, wherever it is. What it raises is a ServingError."""

    name: str
    num_running: int  # as far as is known here

    def generate(self, ingress: str, ask: Ask) -> AsyncGenerator[Event, None]: ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """A method of its backend. Raises WorkerLostError where no answer comes."""
        ...

    async def health(self) -> Health: ...

    async def beat(self, ingress: str) -> None:
        """Tell it that the process of that name lives, and learn how much it has to do."""
        ...


class SpreadBackend:
    """Requests of one context, and those that begin alike, go to the same worker, which has what they share loaded;
    to others while that one has no room."""

    def __init__(self, workers: Sequence[Worker]):
        self._workers = workers
        self._ingress = f"{os.getpid()}-{uuid4().hex}"
        self._beating: asyncio.Task[None] | None = None

    async def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """A request goes on to another worker only before its first event."""
        self._keep_beating()
        refusals: list[ServingError] = []
        for worker in self._in_turn(ask.context or _beginning(ask)):
            has_begun = False
            async with aclosing(worker.generate(self._ingress, ask)) as events:
                try:
                    async for event in events:
                        has_begun = True
                        yield event
                    return
                except (OverloadedError, WorkerLostError) as error:
                    if has_begun:
                        raise
                    refusals.append(error)
        raise refusals[0]

    async def tokenize(self, ask: TokenizeAsk) -> Tokens:
        """Any worker knows the model."""
        tokens = await self._ask_one("", "tokenize", ask)
        assert isinstance(tokens, Tokens)
        return tokens

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return str(await self._ask_one("", "detokenize", ids))

    async def contexts(self) -> list[ContextInfo]:
        answers = await self._try_all("contexts")
        given = [answer for answer in answers if not isinstance(answer, ServingError)]
        if not given:
            raise answers[0]
        return join_contexts(given)

    async def register(self, new: NewContext) -> ContextInfo:
        info = await self._ask_one(new.name, "register", new)
        assert isinstance(info, ContextInfo)
        return info

    async def delete(self, name: str) -> None:
        """Unloaded by its own worker now, by others when they need the room."""
        await self._ask_one(name, "delete", name)

    async def health(self) -> Health:
        """Ready while any worker is."""
        self._keep_beating()
        answers = await asyncio.gather(*(worker.health() for worker in self._workers))
        why = " ".join(answer.why for answer in answers if not answer.ready)
        return Health(any(answer.ready for answer in answers), why)

    async def metrics(self) -> list[Metric]:
        """Of those workers that answer."""
        answers = await self._try_all("metrics")
        named = zip((worker.name for worker in self._workers), answers, strict=True)
        return join_metrics({name: metrics for name, metrics in named if not isinstance(metrics, ServingError)})

    async def _ask_one(self, context: str, method: str, *arguments: Any) -> Any:
        """The context's own worker, or the next that is there. All find what it changes in the store."""
        lost: list[WorkerLostError] = []
        for worker in self._in_turn(context):
            try:
                return await worker.call(method, *arguments)
            except WorkerLostError as error:
                lost.append(error)
        raise lost[0]

    async def _try_all(self, method: str) -> list[Any]:
        """Answers in the workers' order; a ServingError is one."""

        async def ask(worker: Worker) -> Any:
            try:
                return await worker.call(method)
            except ServingError as error:
                return error

        return await asyncio.gather(*(ask(worker) for worker in self._workers))

    def _in_turn(self, context: str) -> list[Worker]:
        """The context's own worker, then the others, those with less to do first."""
        own = max(self._workers, key=lambda worker: sha256(f"{worker.name} {context}".encode()).digest())
        others = [worker for worker in self._workers if worker is not own]
        return [own, *sorted(others, key=lambda worker: worker.num_running)]

    def _keep_beating(self) -> None:
        if self._beating is None:  # when this is made, there may be no event loop
            self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Workers end the requests of a process that they no longer hear."""
        while True:
            await asyncio.gather(*(worker.beat(self._ingress) for worker in self._workers))
            await asyncio.sleep(BEAT_S)


def _beginning(ask: Ask) -> str:
    """What a prompt begins with, and for whom: all turns of a conversation have it."""
    text = "".join(turn.content for turn in ask.turns) if ask.prompt is None else ask.prompt
    return f"{ask.cache_salt}\n{text[:BEGINNING]}"
