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
    Standing,
    TokenizeAsk,
    Tokens,
    WorkerLostError,
)

if TYPE_CHECKING:  # it imports Ray
    from workers.service.ray_worker import RayWorker

BEAT_S = 1.0  # between heartbeats to the workers
HOT = 0.5  # share of a worker's slots: with so many requests more than another, the other loads its contexts too
COLD_S = 30.0  # a worker drops a context that has been idle for so long, if another worker has it
_log = logging.getLogger(__name__)
_STATES = ("ready", "building", "failed")  # the most usable one first


class SpreadBackend:
    """Holds no state but what heartbeats restore: several instances may serve the same workers."""

    def __init__(self, workers: Sequence["RayWorker"]):
        self._workers = workers
        self._known: dict[str, Standing] = {}  # by the worker's name, as last reported
        self._ingress = f"{os.getpid()}-{uuid4().hex}"
        self._beating: asyncio.Task[None] | None = None
        self._telling: dict[str, asyncio.Task[None]] = {}  # by the worker's name, a call beside the heartbeat

    async def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Yield a request's events. If a worker is full or lost before the first one, the next worker is tried."""
        self._keep_beating()
        refusals: list[ServingError] = []
        for worker in self._in_turn(ask.asked_for):
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
        tokens = await self._ask_one("", "tokenize", ask)
        assert isinstance(tokens, Tokens)
        return tokens

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return str(await self._ask_one("", "detokenize", ids))

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        answers = await self._try_all("contexts", name)
        given = [answer for answer in answers if not isinstance(answer, ServingError)]
        if not given:
            raise answers[0]
        return join_contexts(given)

    async def register(self, name: str, text: str) -> ContextInfo:
        info = await self._ask_one(name, "register", name, text)
        assert isinstance(info, ContextInfo)
        return info

    async def delete(self, name: str) -> None:
        """Have one worker delete a context from the store, and all unload it."""
        await self._ask_one(name, "delete", name)
        for worker in self._workers:
            if held := [held for held in _held_by(worker) if name in held.asked_for]:
                await _tell(worker, "drop", held)

    async def workers(self) -> dict[str, Standing | None]:
        self._keep_beating()
        return {worker.name: worker.standing for worker in self._workers}

    async def health(self) -> Health:
        """Ready while any worker is."""
        self._keep_beating()
        answers = await asyncio.gather(*(worker.health() for worker in self._workers))
        why = ". ".join(answer.why for answer in answers if not answer.ready)
        return Health(any(answer.ready for answer in answers), why)

    async def metrics(self) -> list[Metric]:
        """Return the metrics of those workers that answer."""
        answers = await self._try_all("metrics")
        named = zip((worker.name for worker in self._workers), answers, strict=True)
        return join_metrics({name: metrics for name, metrics in named if not isinstance(metrics, ServingError)})

    async def _ask_one(self, context: str, method: str, *arguments: Any) -> Any:
        """Call a method on the context's worker or, if that is lost, the next. All find its changes in the store."""
        lost: list[WorkerLostError] = []
        for worker in self._in_turn(context):
            try:
                return await worker.call(method, *arguments)
            except WorkerLostError as error:
                lost.append(error)
        raise lost[0]

    async def _try_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all workers; return answers, or the ServingErrors raised, in the workers' order."""

        async def ask(worker: "RayWorker") -> Any:
            try:
                return await worker.call(method, *arguments)
            except ServingError as error:
                return error

        return await asyncio.gather(*(ask(worker) for worker in self._workers))

    def _in_turn(self, asked_for: str) -> list["RayWorker"]:
        """Return the worker that a request should go to, then the others, the least busy first."""
        first = choose(self._workers, asked_for)
        others = [worker for worker in self._workers if worker is not first]
        return [first, *sorted(others, key=lambda worker: (worker.standing is None, worker.num_running))]

    def _keep_beating(self) -> None:
        if self._beating is None:  # not in the constructor, which may run without an event loop
            self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Send heartbeats. Workers end the requests of a silent process, so nothing may stop or delay this loop."""
        while True:
            try:
                await asyncio.gather(*(self._hear(worker) for worker in self._workers))
                for worker, held in cold(self._workers):
                    self._tell_beside(worker, "drop", held)
            except Exception:
                _log.exception("a heartbeat to the workers failed; the next one follows")
            await asyncio.sleep(BEAT_S)

    async def _hear(self, worker: "RayWorker") -> None:
        """Send a heartbeat, and tell a restarted worker what it held."""
        await worker.beat(self._ingress)
        if worker.standing is None:
            return
        before = self._known.get(worker.name)
        held = before.held if before is not None and before.since != worker.standing.since else ()
        if not held or self._tell_beside(worker, "hold", held):  # else it is told after a later beat
            self._known[worker.name] = worker.standing

    def _tell_beside(self, worker: "RayWorker", method: str, contexts: Sequence[Held]) -> bool:
        """Call a method in a task of its own, because loading contexts takes longer than workers wait for a heartbeat.

        One call at a time: returns False if the worker's last one is still running.
        """
        telling = self._telling.get(worker.name)
        if telling is not None and not telling.done():
            return False
        self._telling[worker.name] = asyncio.create_task(_tell(worker, method, contexts))
        return True


def choose(workers: Sequence["RayWorker"], asked_for: str) -> "RayWorker":
    """Choose the worker for a request. All processes that know the same choose alike."""
    least = min((worker.num_running for worker in workers if worker.standing), default=0)

    def rank(worker: "RayWorker") -> tuple[bool, bool, bool, bool, bytes]:
        standing = worker.standing
        own = _own(worker, asked_for)
        if standing is None:
            return True, False, False, False, own
        is_hot = worker.num_running - least >= max(1.0, HOT * standing.num_slots)
        has_it = standing.has(asked_for)
        return False, is_hot, not has_it, not (has_it or standing.has_room), own

    return min(workers, key=rank)


def _own(worker: "RayWorker", asked_for: str) -> bytes:
    """The rendezvous hash of a worker and a context, whose least wins: if a worker is lost, only its contexts move."""
    return sha256(f"{worker.name} {asked_for}".encode()).digest()


def cold(workers: Sequence["RayWorker"]) -> list[tuple["RayWorker", list[Held]]]:
    """Return, for each worker, the contexts that it can drop: they are idle there, and another worker keeps them."""
    found = []
    for worker in workers:
        idle = [held for held in _held_by(worker) if not held.num_users and held.idle_s >= COLD_S]
        if surplus := [held for held in idle if _keeper(workers, held.path) is not worker]:
            found.append((worker, surplus))
    return found


def _keeper(workers: Sequence["RayWorker"], path: str) -> "RayWorker":
    """Return the holder that is to keep a context; all processes find the same one."""
    holders = [(worker, held) for worker in workers for held in _held_by(worker) if held.path == path]
    asked_for = min((name for _, held in holders for name in held.asked_for), default=path)
    return min((worker for worker, _ in holders), key=lambda worker: _own(worker, asked_for))


def _held_by(worker: "RayWorker") -> tuple[Held, ...]:
    return worker.standing.held if worker.standing else ()


async def _tell(worker: "RayWorker", method: str, contexts: Sequence[Held]) -> None:
    """Call `hold` or `drop`, ignoring errors: both only prepare for later requests."""
    with suppress(ServingError):
        await worker.call(method, contexts)


def join_contexts(told: Sequence[Sequence[ContextInfo]]) -> list[ContextInfo]:
    """Merge the workers' lists: each context once, as reported by the worker furthest with it; by age, then name."""
    best: dict[str, ContextInfo] = {}
    for info in (info for infos in told for info in infos):
        best[info.name] = min(best.get(info.name, info), info, key=_from_done)
    return sorted(best.values(), key=lambda info: (info.created_at, info.name))


def join_metrics(told: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Merge the workers' metrics: each once, with all samples, labelled by `worker`. told: metrics by worker's name."""
    joined: dict[str, Metric] = {}
    for worker, metrics in told.items():
        for metric in metrics:
            one = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
            one.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in metric.samples]
    return list(joined.values())


def _from_done(info: ContextInfo) -> tuple[int, float]:
    return _STATES.index(info.state), -info.progress
