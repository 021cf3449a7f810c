"""Data of a whole context is prepared for requests in parallel with steps: once, while the context is held."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from csattn.config import SearchConfig
from offload import budget
from tests.workers.serving.test_cpu_backend import SEARCH, backend_of
from tests.workers.serving.test_local import answer, ask, until
from workers.engine.cpu import context as cpu_context
from workers.engine.cpu import preparation
from workers.serving.context_file import ContextFile
from workers.serving.messages import BadRequestError, OverloadedError, ServingError, WorkerLostError

ESTIMATING = SearchConfig(keep=0.1, window_len=32, lookahead=1, rest="moments")
QUEST, EXACT = ask("heron", selector="quest"), ask("heron", selector="exact")


class Gate:
    """Wraps a function: its calls are counted, and wait until the gate opens."""

    def __init__(self, function) -> None:
        self.opened, self.num_calls, self._function = Event(), 0, function

    def __call__(self, *arguments):
        self.num_calls += 1
        assert self.opened.wait(20), "nobody opened the gate"
        return self._function(*arguments)


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    """A gate for `prepare`, which makes any selector's data for a layer."""
    gate = Gate(preparation.prepare)
    monkeypatch.setattr(preparation, "prepare", gate)
    yield gate
    gate.opened.set()


def path_of(store: Path, name: str) -> Path:
    return store / str(ContextFile(store).read()[name].artifact_id)


@pytest.mark.parametrize("search", [SEARCH, ESTIMATING], ids=["selector", "estimate"])
def test_other_requests_continue_while_a_context_is_prepared(built: Path, monkeypatch, gate: Gate, search) -> None:
    if search is ESTIMATING:
        gate.opened.set()
        gate = Gate(cpu_context.moments_of)
        monkeypatch.setattr(cpu_context, "moments_of", gate)
    slow = EXACT if search is ESTIMATING else QUEST
    others = [ask(name, selector="full") for name in ("heron", "walnut")]

    async def main() -> None:
        async with backend_of(built, search) as backend:
            preparing = [asyncio.create_task(answer(backend, slow)) for _ in range(5)]
            await until(lambda: gate.num_calls > 0)
            async with asyncio.timeout(10):
                for other in others:
                    await answer(backend, other)
            assert not any(task.done() for task in preparing)
            gate.opened.set()
            assert len(set(await asyncio.gather(*preparing))) == 1
            assert gate.num_calls == backend._engine.num_layers, "made once, for five requests"
            await answer(backend, slow)
            assert gate.num_calls == backend._engine.num_layers

    asyncio.run(main())


def test_a_context_is_not_unloaded_during_its_preparation(built: Path, gate: Gate) -> None:
    """This holds even if the context was forgotten and no request waits for it."""

    async def main() -> None:
        async with backend_of(built) as backend:
            task = asyncio.create_task(answer(backend, QUEST))
            await until(lambda: gate.num_calls > 0)
            task.cancel()
            await asyncio.wait([task])
            assert backend._scheduler.flow.num_in_flight == 0
            await backend._residency.forget(path_of(built, "heron"))
            assert list(backend._engine._contexts) == [0] and not await backend._residency._make_room()
            gate.opened.set()
            await until(lambda: not backend._engine._contexts)

    asyncio.run(main())


def test_a_failed_preparation_is_reported_and_can_be_retried(built: Path, monkeypatch) -> None:
    def fail(*arguments):
        raise ValueError("the book does not hold")

    async def main() -> None:
        async with backend_of(built) as backend:
            with monkeypatch.context() as patch:
                patch.setattr(preparation, "prepare", fail)
                with pytest.raises(ServingError, match=r"could not be prepared: .*does not hold"):
                    await answer(backend, QUEST)
            assert (await answer(backend, QUEST))[1].reason == "length"
            assert all(resident.num_users == 0 for resident in backend._residency._residents.values())

    asyncio.run(main())


def test_unused_contexts_are_unloaded_to_make_room_for_prepared_data(built: Path, monkeypatch) -> None:
    """Unused contexts are unloaded, least recently used first; those in use stay."""

    async def main() -> None:
        async with backend_of(built) as backend:
            engine = backend._engine
            for name in ("heron", "walnut", "quartz"):
                await answer(backend, ask(name))
            want = await answer(backend, QUEST)
            engine._contexts[0].prepared.clear()
            room = lambda: budget.SPARE_BYTES + (0 if len(engine._contexts) > 2 else 1 << 20)  # noqa: E731
            monkeypatch.setattr(budget, "host_memory_bytes", room)
            assert await answer(backend, QUEST) == want
            assert list(engine._contexts) == [0, 2]
            monkeypatch.setattr(budget, "host_memory_bytes", lambda: 0)
            with pytest.raises(
                OverloadedError, match=r"in use, and there is no room for more .the data that sparq computes"
            ):
                await answer(backend, ask("heron", selector="sparq"))
            assert list(engine._contexts) == [0]

    asyncio.run(main())


def test_an_unsupported_preparation_is_a_bad_request(built: Path) -> None:
    async def main() -> None:
        async with backend_of(built, ESTIMATING) as backend:
            with pytest.raises(BadRequestError, match="rest moments works only with"):
                await answer(backend, QUEST)

    asyncio.run(main())


def test_closing_ends_requests_that_wait_for_a_preparation(built: Path, gate: Gate) -> None:
    async def main() -> None:
        backend = backend_of(built)
        await backend.start()
        waiting = [asyncio.create_task(answer(backend, ask(name, selector="quest"))) for name in ("heron", "walnut")]
        await until(lambda: gate.num_calls > 0 and len(backend._residency._preparing) == 2)
        await backend.close(drain_s=0.0)
        async with asyncio.timeout(10):
            for task in waiting:
                with pytest.raises(WorkerLostError, match="shutting down"):
                    await task
        assert not gate.opened.is_set(), "while one is still being prepared"

    asyncio.run(main())
