"""The attention worker without Ray: its replies, and when it ends abandoned requests."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")

from csattn.errors import ConfigError
from tests.workers.api.fake_backend import FakeBackend, Script
from workers.service import attention_actor, making, ray_app, search_actor
from workers.service.attention_actor import AttentionActor
from workers.serving.messages import (
    Ask,
    ContextNotReadyError,
    Done,
    Health,
    Held,
    Piece,
    Sampling,
    ServingError,
    UnknownModelError,
    WorkerLostError,
    WorkerStatus,
)
from workers.settings import Settings

NUMBERS = count()
SLOW = Script(words=("a",) * 200, pause_s=0.02)


class Startable(FakeBackend):
    async def start(self) -> None:
        self.add("book")

    async def hold(self, contexts: Sequence[Held]) -> None:
        self.held = tuple(contexts)

    async def drop(self, contexts: Sequence[Held]) -> None:
        if not self.held:
            raise ServingError("there is nothing to drop")
        self.held = tuple(set(self.held) - set(contexts))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Startable:
    backend = Startable(scripts={"slow": SLOW})
    monkeypatch.setattr(making, "make_backend", lambda settings, launch: backend)
    monkeypatch.setattr(search_actor, "SearchActors", lambda: None)
    monkeypatch.setattr(attention_actor, "LEASE_S", 0.2)
    return backend


def ask(question: str, context: str = "book") -> Ask:
    return Ask(request_id=f"{next(NUMBERS)}", context=context, prompt=question, sampling=Sampling(max_new_tokens=200))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not is_so():
            await asyncio.sleep(0.005)


def test_the_actor_returns_events_and_errors_as_values(backend: Startable) -> None:
    async def run() -> None:
        actor = AttentionActor(Settings())
        got = [event async for events in actor.generate("1", "i", ask("quick")) for event in events]
        assert got[:-1] == [Piece(word) for word in Script().words] and isinstance(got[-1], Done)
        [error] = [event async for events in actor.generate("2", "i", ask("quick", "none")) for event in events]
        assert isinstance(error, UnknownModelError)
        assert await actor.heartbeat("i") == backend.status()
        assert await actor.health() == Health(True) and await actor.failure() is None

    asyncio.run(run())


def test_a_bug_fails_its_request_and_is_not_taken_for_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch, backend: Startable
) -> None:
    """Ray wraps what a method raises in the class of error that it also raises for a dead actor."""

    async def fail(ids: tuple[int, ...]) -> str:
        raise KeyError("/secret/path")

    async def run() -> None:
        actor = AttentionActor(Settings())
        monkeypatch.setattr(backend, "detokenize", fail)
        backend.scripts["fails"] = Script(fail_at=0, error=KeyError("/secret/path"))
        of_call = await actor.call("detokenize", (1,))
        [of_answer] = [event async for events in actor.generate("1", "i", ask("fails")) for event in events]
        for error in (of_call, of_answer):
            assert type(error) is ServingError and error.status == 500
            assert "secret" not in error.message and "secret" in error.detail

    asyncio.run(run())


def test_an_unreadable_store_is_reported_and_not_as_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch, backend: Startable
) -> None:
    async def start() -> None:
        raise ServingError("contexts.json cannot be read; move it away")

    async def run() -> None:
        actor = AttentionActor(Settings())
        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", start)
            for answer in (await actor.health(), await actor.call("contexts"), await actor.call("delete", "a")):
                assert isinstance(answer, ServingError) and "move it away" in answer.message
            [error] = [event async for events in actor.generate("1", "i", ask("quick")) for event in events]
            assert isinstance(error, ServingError) and "move it away" in error.message
        assert await actor.health() == Health(True), "it has been moved away"
        got = [event async for events in actor.generate("2", "i", ask("quick")) for event in events]
        assert isinstance(got[-1], Done)

    asyncio.run(run())


def test_the_actor_holds_and_drops_contexts_on_request(backend: Startable) -> None:
    book, verse = (Held(name, (name,), 5, 0) for name in ("book", "verse"))

    async def run() -> None:
        actor = AttentionActor(Settings())
        assert await actor.call("hold", [book, verse]) is None
        assert await actor.call("drop", [verse]) is None
        status = await actor.heartbeat("i")
        assert isinstance(status, WorkerStatus) and status.held == (book,) and status.held_bytes == 5
        await actor.call("drop", [book])
        assert isinstance(await actor.call("drop", [book]), ServingError)

    asyncio.run(run())


def test_a_context_name_that_a_worker_refuses_fails_the_start() -> None:
    asked = list[tuple[str, ...]]()

    def call(*arguments: str) -> ServingError | None:
        asked.append(arguments)
        return ContextNotReadyError("the context's artifact cannot be used") if arguments[1] == "b" else None

    ray = SimpleNamespace(get=lambda answer: answer)
    actor = SimpleNamespace(call=SimpleNamespace(remote=call))
    with pytest.raises(ContextNotReadyError, match="cannot be used"):
        ray_app._name(ray, actor, {"a": "1234", "b": "5678", "c": "9abc"})
    assert asked == [("name", "a", "1234"), ("name", "b", "5678")]


def test_ending_a_request_cancels_its_answer(backend: Startable) -> None:
    async def run() -> None:
        actor = AttentionActor(Settings())
        events = actor.generate("1", "i", ask("slow"))
        await anext(events)
        status = await actor.heartbeat("i")
        assert isinstance(status, WorkerStatus) and status.num_running == len(backend.running) == 1
        await actor.end("1")
        await until(lambda: not backend.running)
        assert backend.num_ended_early == 1
        assert sum([len(batch) async for batch in events]) < len(SLOW.words)  # the stream ends early

    asyncio.run(run())


def test_requests_of_an_ingress_without_heartbeats_are_ended_and_no_others(backend: Startable) -> None:
    async def run() -> None:
        actor = AttentionActor(Settings())
        silent, heard = actor.generate("1", "gone", ask("slow")), actor.generate("2", "here", ask("slow"))
        await anext(silent)
        await anext(heard)
        for _ in range(20):
            await actor.heartbeat("here")
            await asyncio.sleep(0.02)
        assert len(backend.running) == 1 and backend.num_ended_early == 1
        await heard.aclose()
        await until(lambda: not backend.running)

    backend.scripts["slow"] = SLOW
    asyncio.run(run())


def test_requests_outlive_a_standstill_of_the_workers_own_process(backend: Startable) -> None:
    """As of one that is stopped for a while: heartbeats that were sent meanwhile arrive afterwards."""

    async def run() -> None:
        actor = AttentionActor(Settings())
        events = actor.generate("1", "here", ask("slow"))
        await anext(events)
        time.sleep(3 * attention_actor.LEASE_S)
        await asyncio.sleep(0.3 * attention_actor.LEASE_S)
        assert len(backend.running) == 1
        await until(lambda: not backend.running)
        assert backend.num_ended_early == 1, "no heartbeat has followed"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConfigError("there is no such model"), "there is no such model"),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (None, "ModuleNotFoundError: import of workers.service.making halted; None in sys.modules"),
    ],
    ids=["refused", "failed", "not imported"],
)
def test_a_worker_that_cannot_start_reports_the_reason_and_exits(
    monkeypatch: pytest.MonkeyPatch, backend: Startable, error: Exception | None, why: str
) -> None:
    """Its process exits by itself: Ray restarts an actor that has exited, but not one whose constructor has raised."""

    def refuse(settings: Settings, launch: object) -> None:
        assert error is not None
        raise error

    ended: list[int] = []
    monkeypatch.setattr(making, "make_backend", refuse)
    if error is None:
        monkeypatch.setitem(sys.modules, "workers.service.making", None)  # type: ignore[arg-type]
    monkeypatch.setattr(attention_actor, "_RESTART_S", 0.01)
    monkeypatch.setattr(attention_actor.os, "_exit", ended.append)

    async def run() -> None:
        actor = AttentionActor(Settings())
        assert await actor.failure() == why
        assert await actor.health() == Health(False, why)
        [error] = [event async for events in actor.generate("1", "i", ask("quick")) for event in events]
        for lost in (error, await actor.heartbeat("i"), await actor.call("contexts")):  # others are asked instead
            assert isinstance(lost, WorkerLostError) and why in lost.detail and why not in lost.message
        await until(lambda: ended == [1])

    asyncio.run(run())
