"""Which worker gets which request, and what happens if a worker is full, has ended, or ends during an answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily

from workers.service import spread_backend
from workers.service.spread_backend import IDLE_S, SpreadBackend, choose, surplus_contexts
from workers.serving.messages import (
    Ask,
    BadRequestError,
    ContextInfo,
    Done,
    Event,
    Health,
    Held,
    OverloadedError,
    Piece,
    Sampling,
    ServingError,
    Turn,
    UnknownModelError,
    WorkerLostError,
    WorkerStatus,
)

DONE = Done(reason="stop", context_tokens=1, question_tokens=1, new_tokens=1, cached_tokens=1)
FULL, LOST = OverloadedError("full", retry_after_s=3.0), WorkerLostError("lost")


@dataclass
class Here:
    """A worker without a process: it answers with its name, or fails as its fields say."""

    name: str
    num_running: int = 0
    status: WorkerStatus | None = None
    error: ServingError | None = None
    fails_after: int = 0  # number of pieces
    answers: dict[str, Any] = field(default_factory=dict)  # return values, by method
    calls: list[Any] = field(default_factory=list)
    num_closed: int = 0
    num_beats: int = 0
    may_answer: asyncio.Event | None = None  # calls wait for it; None: they return at once

    async def generate(self, ingress: str, ask: Ask) -> AsyncGenerator[Event, None]:
        self.calls.append(ask.context)
        try:
            for number in range(3):
                if self.error is not None and number == self.fails_after:
                    raise self.error
                yield Piece(self.name)
            yield DONE
        finally:
            self.num_closed += 1

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        if self.may_answer is not None:
            await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.answers.get(method)

    async def health(self) -> Health:
        return Health(self.error is None, "" if self.error is None else f"{self.name} is not there")

    async def heartbeat(self, ingress: str) -> None:
        self.num_beats += 1


def workers(count: int = 4, **changes: Any) -> list[Here]:
    return [Here(f"attention-{number}", **changes) for number in range(count)]


def ask(context: str) -> Ask:
    return Ask(request_id="r", context=context, prompt="?", sampling=Sampling(max_new_tokens=3))


def said(backend: SpreadBackend, context: str) -> list[Event]:
    async def collect() -> list[Event]:
        async with aclosing(backend.generate(ask(context))) as events:
            return [event async for event in events]

    return asyncio.run(collect())


def owner(given: list[Here], context: str) -> Here:
    said(SpreadBackend(given), context)
    [one] = [worker for worker in given if context in worker.calls]
    return one


def test_a_context_is_routed_to_the_same_worker_by_every_ingress() -> None:
    given = workers()
    owners = {f"context-{number}": owner(given, f"context-{number}").name for number in range(40)}
    assert set(owners.values()) == {worker.name for worker in given}
    again = workers()[::-1]
    assert {context: owner(again, context).name for context in owners} == owners


def test_removing_a_worker_moves_only_its_contexts() -> None:
    names = [f"context-{number}" for number in range(40)]
    before = {name: owner(workers(), name).name for name in names}
    after = {name: owner(workers()[:3], name).name for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "attention-3")


@pytest.mark.parametrize("error", [FULL, LOST])
def test_a_refused_request_goes_to_the_least_busy_worker(error: ServingError) -> None:
    given = workers()
    own = owner(given, "book")
    own.error = error
    others = [worker for worker in given if worker is not own]
    for number, worker in enumerate(others):
        worker.num_running = 5 - number
    assert said(SpreadBackend(given), "book") == [Piece(others[-1].name)] * 3 + [DONE]
    assert [worker.calls for worker in others[:-1]] == [[], []]


def test_a_request_that_has_returned_tokens_is_not_retried_elsewhere() -> None:
    given = workers()
    own = owner(given, "book")
    own.error, own.fails_after = LOST, 2
    events: list[Event] = []

    async def collect() -> None:
        async for event in SpreadBackend(given).generate(ask("book")):
            events.append(event)

    with pytest.raises(WorkerLostError):
        asyncio.run(collect())
    assert events == [Piece(own.name)] * 2
    assert not any(worker.calls for worker in given if worker is not own)


def test_overload_of_all_workers_returns_the_owners_retry_after() -> None:
    given = workers(3, error=LOST)
    for worker in given:
        worker.error = FULL if worker.name == owner(workers(3), "book").name else LOST
    with pytest.raises(OverloadedError) as caught:
        said(SpreadBackend(given), "book")
    assert caught.value.retry_after_s == 3.0
    assert all(worker.calls == ["book"] for worker in given)


def test_a_bad_request_is_refused_by_the_first_worker_without_retries() -> None:
    given = workers(error=BadRequestError("wrong"))
    with pytest.raises(BadRequestError):
        said(SpreadBackend(given), "book")
    assert sum(len(worker.calls) for worker in given) == 1


def test_closing_ends_the_request_at_its_worker() -> None:
    given = workers(1)

    async def leave_early() -> None:
        events = SpreadBackend(given).generate(ask("book"))
        await anext(events)
        await events.aclose()
        assert given[0].num_closed == 1

    asyncio.run(leave_early())


def test_the_backend_is_ready_while_any_worker_is() -> None:
    given = workers(2)
    backend = SpreadBackend(given)
    assert asyncio.run(backend.health()) == Health(True)
    given[0].error = LOST
    assert asyncio.run(SpreadBackend(given).health()) == Health(True, "attention-0 is not there")
    given[1].error = LOST
    assert asyncio.run(SpreadBackend(given).health()) == Health(
        False, "attention-0 is not there. attention-1 is not there"
    )


def test_contexts_are_collected_from_the_reachable_workers() -> None:
    info = ContextInfo(name="book", state="ready")
    given = workers(2, answers={"contexts": [info]})
    assert asyncio.run(SpreadBackend(given).contexts("book")) == [info]
    assert given[0].calls == given[1].calls == [("contexts", "book")]
    given[0].error = LOST
    assert asyncio.run(SpreadBackend(given).contexts()) == [info]
    given[1].error = LOST
    with pytest.raises(WorkerLostError):
        asyncio.run(SpreadBackend(given).contexts())


def test_a_context_is_registered_and_deleted_at_its_own_worker() -> None:
    new, info = ("book", "text"), ContextInfo(name="book", state="building")
    given = workers(answers={"register": info, "delete": None})
    own = owner(given, "book")
    for worker in given:
        worker.calls.clear()
    backend = SpreadBackend(given)
    assert asyncio.run(backend.register(*new)) == info
    asyncio.run(backend.delete("book"))
    assert own.calls == [("register", *new), ("delete", "book")]
    own.error = LOST
    assert asyncio.run(backend.register(*new)) == info
    assert sum(("register", *new) in worker.calls for worker in given if worker is not own) == 1
    own.error = UnknownModelError("there is none")
    with pytest.raises(UnknownModelError):
        asyncio.run(backend.delete("book"))


def test_metrics_are_collected_from_the_reachable_workers() -> None:
    given = workers(2, answers={"metrics": [GaugeMetricFamily("running", "Now.", value=1.0)]})
    given[0].error = LOST
    [metric] = asyncio.run(SpreadBackend(given).metrics())
    assert [sample.labels for sample in metric.samples] == [{"worker": "attention-1"}]


def test_metrics_do_not_wait_for_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_backend, "METRICS_S", 0.05)
    given = workers(2, answers={"metrics": [GaugeMetricFamily("running", "Now.", value=1.0)]})

    async def run() -> None:
        given[0].may_answer = asyncio.Event()
        async with asyncio.timeout(5):
            [metric] = await SpreadBackend(given).metrics()
        assert [sample.labels for sample in metric.samples] == [{"worker": "attention-1"}]

    asyncio.run(run())


def test_a_conversations_turns_share_a_worker_and_conversations_spread() -> None:
    """Conversations with other salts are distributed separately. Prompts of token ids go by their beginnings, too."""
    some = workers()
    backend = SpreadBackend(some)

    def make_ask(turns: tuple[Turn, ...], prompt: Any = None, salt: str = "") -> Ask:
        sampling = Sampling(max_new_tokens=3)
        return Ask(request_id="r", context="", turns=turns, prompt=prompt, cache_salt=salt, sampling=sampling)

    async def by(ask: Ask) -> str:
        events = [event async for event in backend.generate(ask)]
        return "".join(event.text for event in events if isinstance(event, Piece))

    async def main() -> None:
        began = set()
        for number in range(30):
            first = (Turn("system", f"Be brief, {number}. " * 100), Turn("user", "Who?"))
            turns = [
                first,
                (*first, Turn("assistant", "He."), Turn("user", "Why?")),
                (*first[:1], Turn("user", "Where?")),
            ]
            [worker] = {await by(make_ask(each)) for each in turns}
            began.add(worker)
            assert await by(make_ask((), tuple(range(number, number + 2000)))) == await by(
                make_ask((), tuple(range(number, number + 1024)))
            )
        assert len(began) == 4
        assert len({await by(make_ask(first, salt=str(salt))) for salt in range(30)}) == 4

    asyncio.run(main())


def status(*held: Held, num_running: int = 0, since: float = 1.0, has_room: bool = True) -> WorkerStatus:
    return WorkerStatus(since=since, num_running=num_running, max_requests=8, held=held, has_room=has_room)


def holding(*names: str, num_users: int = 0, idle_s: float = 0.0) -> Held:
    return Held("/".join(names), names, 10, num_users, idle_s)


def test_a_request_goes_to_the_worker_that_holds_its_context() -> None:
    for number in range(20):
        given = workers(status=status())
        given[number % 4].status = status(holding("book"))
        assert choose(given, "book") is given[number % 4]


def test_a_context_that_is_not_loaded_goes_to_a_worker_with_room() -> None:
    given = workers(status=status(holding("x"), has_room=False))
    own = choose(given, "book")
    roomy = next(worker for worker in given if worker is not own)
    roomy.status = status(holding("y"))
    assert choose(given, "book") is roomy
    assert choose(given, "x") is not roomy, "which it would have to load"


def test_a_busy_context_is_replicated_and_idle_replicas_are_dropped() -> None:
    given = workers(2, status=status())
    hot, other = given
    hot.status = status(holding("book", num_users=3))
    hot.num_running = 3
    assert choose(given, "book") is hot
    hot.num_running = 4  # more than the other by half of its slots
    assert choose(given, "book") is other
    other.num_running = 4
    assert choose(given, "book") is hot
    both = status(holding("book", idle_s=IDLE_S))
    hot.status, other.status, hot.num_running, other.num_running = both, both, 0, 0
    [(worker, surplus)] = surplus_contexts(given)
    assert surplus == [both.held[0]] and worker is not choose(given, "book")
    for idle in (holding("book", idle_s=IDLE_S - 1), holding("book", num_users=1)):
        worker.status = status(idle)
        assert surplus_contexts(given) == []
    worker.status = None
    assert surplus_contexts(given) == []


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_context_of_two_names_keeps_one_replica(first: str) -> None:
    """This holds whichever name each worker was asked for first."""
    for number in range(20):
        names = f"a{number}", f"b{number}"
        given = workers(3)
        for worker, order in zip(given, (names, names[::-1], names[:1] if first == "a" else names[1:]), strict=True):
            worker.status = status(Held("path", order, 10, 0, IDLE_S))
        assert len(surplus_contexts(given)) == 2


def test_an_unresponsive_worker_is_chosen_last() -> None:
    given = workers(3, status=status())
    choose(given, "book").status = None
    assert choose(given, "book").status is not None
    for worker in given:
        worker.status = None
    assert choose(given, "book").name == choose(workers(3), "book").name


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


def test_a_restarted_worker_reloads_the_contexts_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_backend, "HEARTBEAT_S", 0.001)
    held = holding("book"), holding("verse")
    given = workers(2, status=status())
    lost, other = given
    lost.status = status(*held)

    async def main() -> None:
        backend = SpreadBackend(given)
        assert await backend.workers() == {"attention-0": lost.status, "attention-1": status()}
        await asyncio.sleep(0.01)
        assert lost.calls == []
        lost.status = None
        await asyncio.sleep(0.01)
        lost.status = status(since=2.0)
        await until(lambda: lost.calls)
        lost.status = status(*held, since=2.0)
        await asyncio.sleep(0.01)
        assert lost.calls == [("hold", held)] and other.calls == []

    asyncio.run(main())


def test_heartbeats_continue_while_a_worker_loads_or_drops_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker gets one call at a time, and what it held before a restart is loaded again."""
    monkeypatch.setattr(spread_backend, "HEARTBEAT_S", 0.001)
    given = workers(2)
    held = [holding("book", idle_s=IDLE_S)]

    async def beats(count: int) -> None:
        for worker in given:
            worker.num_beats = 0
        await until(lambda: all(worker.num_beats >= count for worker in given))

    async def main() -> None:
        for worker in given:
            worker.status = status(*held)
        [(slow, _)] = surplus_contexts(given)
        slow.may_answer = asyncio.Event()
        await SpreadBackend(given).workers()
        await beats(5)
        assert slow.calls == [("drop", held)]
        slow.status = status(since=2.0)  # restarted before it has answered
        await beats(5)
        assert slow.calls == [("drop", held)]
        slow.may_answer.set()
        await until(lambda: len(slow.calls) > 1)
        await beats(5)
        assert slow.calls == [("drop", held), ("hold", tuple(held))]

    asyncio.run(main())


def test_heartbeats_continue_after_a_failed_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsOnce(Here):
        async def heartbeat(self, ingress: str) -> None:
            await super().heartbeat(ingress)
            if self.num_beats == 1:
                raise RuntimeError("what nobody expected")

    monkeypatch.setattr(spread_backend, "HEARTBEAT_S", 0.001)
    given = [FailsOnce("attention-0"), Here("attention-1")]

    async def main() -> None:
        await SpreadBackend(given).workers()
        await until(lambda: all(worker.num_beats > 2 for worker in given))

    asyncio.run(main())
    assert "what nobody expected" in caplog.text


def test_a_deleted_context_is_unloaded_by_all_workers() -> None:
    given = workers(3, status=status(holding("book"), holding("verse")))
    asyncio.run(SpreadBackend(given).delete("book"))
    assert all(("drop", [holding("book")]) in worker.calls for worker in given)
    assert sum(("delete", "book") in worker.calls for worker in given) == 1
