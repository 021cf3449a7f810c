"""A Backend over several attention workers: it routes requests to them and merges their answers.

A request goes to a worker that has loaded its context; if none has, to the one that rendezvous hashing of its name
gives, if that has room. Once a worker has many more requests than another, the other gets requests of its contexts, and
so loads them too; when these have been idle for a while, only one worker keeps them. A restarted worker is told what it
held.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from prometheus_client import Metric

from workers.serving.messages import (
    Ask,
    ContextInfo,
    Event,
    Health,
    Held,
    OverloadedError,
    ServingError,
    TokenizeAsk,
    Tokens,
    WorkerLostError,
    WorkerStatus,
)

if TYPE_CHECKING:  # it imports Ray
    from workers.service.ray_worker import RayWorker

HEARTBEAT_S = 1.0  # between heartbeats to the workers
LOAD_GAP = 0.5  # of a worker's `max_requests`: if it has so many more than another, that one loads its contexts too
METRICS_S = 2.0  # how long metrics wait for a worker: monitors give up after ten seconds
IDLE_S = 30.0  # a worker drops a context that has been idle for so long, if another worker has it
_log = logging.getLogger(__name__)
_STATES = ("ready", "building", "failed")  # the most usable one first


class SpreadBackend:
    """Holds no state but what heartbeats restore: several instances may serve the same workers."""

    def __init__(self, workers: Sequence["RayWorker"]):
        self._workers = workers
        self._known: dict[str, WorkerStatus] = {}  # by the worker's name, as last reported
        self._ingress = f"{os.getpid()}-{uuid4().hex}"
        self._heartbeats: asyncio.Task[None] | None = None
        self._background_calls: dict[str, asyncio.Task[None]] = {}  # by the worker's name, a call beside the heartbeat

    async def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Yield a request's events. If a worker is full or lost before the first one, the next worker is tried."""
        self._start_heartbeats()
        refusals: list[ServingError] = []
        for worker in self._candidates(ask.routing_key):
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
        """Tokenize on any worker: all have the model."""
        tokens = await self._call_one("", "tokenize", ask)
        assert isinstance(tokens, Tokens)
        return tokens

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return str(await self._call_one("", "detokenize", ids))

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        answers = await self._call_all("contexts", name)
        given = [answer for answer in answers if not isinstance(answer, ServingError)]
        if not given:
            raise answers[0]
        return join_contexts(given)

    async def register(self, name: str, text: str) -> ContextInfo:
        info = await self._call_one(name, "register", name, text)
        assert isinstance(info, ContextInfo)
        return info

    async def delete(self, name: str) -> None:
        """Have one worker delete a context from the store, and all unload it."""
        await self._call_one(name, "delete", name)
        for worker in self._workers:
            if held := [held for held in _contexts_of(worker) if name in held.routing_keys]:
                await _call_quietly(worker, "drop", held)

    async def workers(self) -> dict[str, WorkerStatus | None]:
        self._start_heartbeats()
        return {worker.name: worker.status for worker in self._workers}

    async def health(self) -> Health:
        """Ready while any worker is."""
        self._start_heartbeats()
        answers = await asyncio.gather(*(worker.health() for worker in self._workers))
        why = ". ".join(answer.why for answer in answers if not answer.ready)
        return Health(any(answer.ready for answer in answers), why)

    async def metrics(self) -> list[Metric]:
        """Return the metrics of those workers that answer within METRICS_S."""
        answers = await self._call_all("metrics", timeout_s=METRICS_S)
        named = zip((worker.name for worker in self._workers), answers, strict=True)
        return join_metrics({name: metrics for name, metrics in named if not isinstance(metrics, ServingError)})

    async def _call_one(self, context: str, method: str, *arguments: Any) -> Any:
        """Call a method on the context's worker or, if that is lost, the next. All find its changes in the store."""
        lost: list[WorkerLostError] = []
        for worker in self._candidates(context):
            try:
                return await worker.call(method, *arguments)
            except WorkerLostError as error:
                lost.append(error)
        raise lost[0]

    async def _call_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on all workers; return answers, or the ServingErrors raised, in the workers' order.

        timeout_s: shorter than that of any call; None: that.
        """

        async def ask(worker: "RayWorker") -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await worker.call(method, *arguments)
            except TimeoutError:
                return WorkerLostError(f"the worker {worker.name} has not answered within {timeout_s:g} s")
            except ServingError as error:
                return error

        return await asyncio.gather(*(ask(worker) for worker in self._workers))

    def _candidates(self, routing_key: str) -> list["RayWorker"]:
        """Return the worker that a request should go to, then the others, the least busy first."""
        first = choose(self._workers, routing_key)
        others = [worker for worker in self._workers if worker is not first]
        return [first, *sorted(others, key=lambda worker: (worker.status is None, worker.num_running))]

    def _start_heartbeats(self) -> None:
        if self._heartbeats is None:  # not in the constructor, which may run without an event loop
            self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        """Send heartbeats. Workers end the requests of a silent process, so nothing may stop or delay this loop."""
        while True:
            try:
                await asyncio.gather(*(self._heartbeat(worker) for worker in self._workers))
                for worker, held in surplus_contexts(self._workers):
                    self._call_in_background(worker, "drop", held)
            except Exception:
                _log.exception("a heartbeat to the workers failed; the next one follows")
            await asyncio.sleep(HEARTBEAT_S)

    async def _heartbeat(self, worker: "RayWorker") -> None:
        """Send a heartbeat, and tell a restarted worker what it held."""
        await worker.heartbeat(self._ingress)
        if worker.status is None:
            return
        before = self._known.get(worker.name)
        held = before.held if before is not None and before.since != worker.status.since else ()
        if not held or self._call_in_background(worker, "hold", held):  # else after a later heartbeat
            self._known[worker.name] = worker.status

    def _call_in_background(self, worker: "RayWorker", method: str, contexts: Sequence[Held]) -> bool:
        """Call a method in a task of its own, because loading contexts takes longer than workers wait for a heartbeat.

        One call at a time: returns False if the worker's last one is still running.
        """
        running = self._background_calls.get(worker.name)
        if running is not None and not running.done():
            return False
        self._background_calls[worker.name] = asyncio.create_task(_call_quietly(worker, method, contexts))
        return True


def choose(workers: Sequence["RayWorker"], routing_key: str) -> "RayWorker":
    """Choose the worker for a request. All processes that know the same choose alike."""
    least = min((worker.num_running for worker in workers if worker.status), default=0)

    def rank(worker: "RayWorker") -> tuple[bool, bool, bool, bool, bytes]:
        status = worker.status
        context_hash = _rendezvous_hash(worker, routing_key)
        if status is None:
            return True, False, False, False, context_hash
        is_overloaded = worker.num_running - least >= max(1.0, LOAD_GAP * status.max_requests)
        has_it = status.has(routing_key)
        return False, is_overloaded, not has_it, not (has_it or status.has_room), context_hash

    return min(workers, key=rank)


def _rendezvous_hash(worker: "RayWorker", routing_key: str) -> bytes:
    """The rendezvous hash of a worker and a context, whose least wins: if a worker is lost, only its contexts move."""
    return sha256(f"{worker.name} {routing_key}".encode()).digest()


def surplus_contexts(workers: Sequence["RayWorker"]) -> list[tuple["RayWorker", list[Held]]]:
    """Return, for each worker, the contexts that it can drop: they are idle there, and another worker keeps them."""
    found = []
    for worker in workers:
        idle = [held for held in _contexts_of(worker) if not held.num_users and held.idle_s >= IDLE_S]
        if surplus := [held for held in idle if _keeper(workers, held.path) is not worker]:
            found.append((worker, surplus))
    return found


def _keeper(workers: Sequence["RayWorker"], path: str) -> "RayWorker":
    """Return the holder that is to keep a context; all processes find the same one."""
    holders = [(worker, held) for worker in workers for held in _contexts_of(worker) if held.path == path]
    routing_key = min((name for _, held in holders for name in held.routing_keys), default=path)
    return min((worker for worker, _ in holders), key=lambda worker: _rendezvous_hash(worker, routing_key))


def _contexts_of(worker: "RayWorker") -> tuple[Held, ...]:
    return worker.status.held if worker.status else ()


async def _call_quietly(worker: "RayWorker", method: str, contexts: Sequence[Held]) -> None:
    """Call `hold` or `drop`, ignoring errors: both only prepare for later requests."""
    with suppress(ServingError):
        await worker.call(method, contexts)


def join_contexts(reports: Sequence[Sequence[ContextInfo]]) -> list[ContextInfo]:
    """Merge the workers' lists: each context once, as reported by the worker furthest with it; by age, then name."""
    best: dict[str, ContextInfo] = {}
    for info in (info for infos in reports for info in infos):
        best[info.name] = min(best.get(info.name, info), info, key=lambda of: (_STATES.index(of.state), -of.progress))
    return sorted(best.values(), key=lambda info: (info.created_at, info.name))


def join_metrics(reports: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Merge the workers' metrics: each once, with all samples, labelled by `worker`. reports: by worker's name."""
    joined: dict[str, Metric] = {}
    for worker, metrics in reports.items():
        for metric in metrics:
            one = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
            one.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in metric.samples]
    return list(joined.values())
