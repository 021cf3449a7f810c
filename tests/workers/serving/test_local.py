"""The backend in one process: many readers on one event loop, one engine, cancellations and shutdown."""

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient

from offload.errors import MemoryPlanError
from tests.idle import is_idle
from tests.tiny import loaded
from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.full_engine import FullEngine
from workers.api import make_app
from workers.serving import prefixes
from workers.serving.context_build import Builder
from workers.serving.local import LocalBackend
from workers.serving.messages import (
    Ask,
    BadRequestError,
    Done,
    OverloadedError,
    Piece,
    Sampling,
    ServingError,
    TimedOutError,
    Turn,
    UnknownModelError,
    WorkerLostError,
)
from workers.serving.step_thread import StepThread
from workers.settings import KeptSettings, LimitSettings, Settings, StoreSettings


def settings_of(store: Path, **limits: Any) -> Settings:
    kept = KeptSettings(disk_bytes=0)  # the tests share the store
    return Settings(store=StoreSettings(path=store), limits=LimitSettings(**limits), kept=kept)


@asynccontextmanager
async def running(
    store: Path, engine: FullEngine | None = None, make: Callable[..., Any] = LocalBackend, **limits: Any
) -> AsyncIterator[LocalBackend]:
    async with make(engine or FullEngine(loaded()), loaded(), settings_of(store, **limits)) as backend:
        yield backend


def ask(context: str = "heron", question: str = "who?", max_new_tokens: int = 6, **more: Any) -> Ask:
    own = {field.name for field in dataclasses.fields(Ask)}
    fields = {name: more.pop(name) for name in own & more.keys()}
    if not fields.keys() & {"prompt", "turns"}:
        fields["turns"] = (Turn("user", question),)
    sampling = Sampling(max_new_tokens=max_new_tokens, **more)
    return Ask(request_id="1", context=context, sampling=sampling, **fields)


async def answer(backend: LocalBackend, asked: Ask) -> tuple[str, Done]:
    """Return the text and its end. The number of cached tokens is set to 0, because the text does not depend on it."""
    text = ""
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Done):
                return text, replace(event, cached_tokens=0)
            text += event.text
    raise AssertionError("events end with Done")


async def outcomes_of(backend: LocalBackend) -> dict[str, float]:
    """Return the number of ended requests by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for metric in await backend.metrics()
        if metric.name == "csattn_requests"
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_mixed_requests_are_answered_from_their_own_contexts(built: Path) -> None:
    """Each of 120 requests gets the answer that it gets alone, and contexts answer differently."""

    async def main() -> None:
        kinds = [
            ask(secret, f"who is {n}?", 4 + n % 5, temperature=0.7 * (n % 2), seed=n)
            for n in range(10)
            for secret in SECRETS
        ]
        async with running(built) as backend:
            alone = [await answer(backend, kind) for kind in kinds]
            together = await asyncio.gather(*(answer(backend, kind) for kind in kinds[:16] * 2))
            assert together == alone[:16] * 2
            order = [(7 * i) % len(kinds) for i in range(120)]
            limit = asyncio.Semaphore(40)

            async def one(kind: int) -> tuple[str, Done]:
                async with limit:
                    return await answer(backend, kinds[kind])

            assert await asyncio.gather(*map(one, order)) == [alone[kind] for kind in order]
        for n in range(10):
            assert len({alone[3 * n + i][0] for i in range(3)}) == 3

    asyncio.run(main())


def test_cancelled_readers_free_their_slots_at_once(built: Path) -> None:
    async def main() -> None:
        engine = FullEngine(loaded(), max_requests=4, tail_capacity=600)
        async with running(built, engine) as backend:
            for n in range(40):
                events = backend.generate(ask(SECRETS[n % 3], max_new_tokens=500))
                await anext(events)
                if n % 2:
                    task = asyncio.ensure_future(anext(events))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                before = engine.num_steps
                await events.aclose()
                await until(lambda: not engine.request_slots)
                assert engine.num_steps <= before + 2
            await asyncio.sleep(0.05)
            idle = engine.num_steps
            await asyncio.sleep(0.05)
            assert engine.num_steps == idle
            assert backend._scheduler.flow.num_in_flight == 0

    asyncio.run(main())


def test_overload_is_refused_at_once_and_passes(built: Path) -> None:
    async def main() -> None:
        async with running(built, max_concurrent_requests=2, max_queued_requests=2) as backend:
            held = [backend.generate(ask(max_new_tokens=200)) for _ in range(4)]
            first = [asyncio.ensure_future(anext(events)) for events in held]
            await until(lambda: backend._scheduler.flow.num_in_flight == 4)
            taken_s = []
            for _ in range(40):
                started = time.perf_counter()
                with pytest.raises(OverloadedError) as refused:
                    await answer(backend, ask())
                taken_s.append(time.perf_counter() - started)
                assert refused.value.retry_after_s
            assert sorted(taken_s)[20] < 0.2
            for task, events in zip(first, held, strict=True):
                task.cancel()
                await asyncio.wait([task])
                await events.aclose()
            assert (await answer(backend, ask()))[1].reason == "length"
            assert (await outcomes_of(backend))["refused"] == 40

    asyncio.run(main())


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (ask("nobody"), UnknownModelError, "no context 'nobody'"),
        (ask(keep=2.0), BadRequestError, "keep must be more than 0 and at most 1, got 2.0"),
        (ask(lookahead=3), BadRequestError, "lookahead must be"),
        (ask(prompt=""), BadRequestError, "empty"),
        (ask(question="x" * 900), BadRequestError, "shorter"),
        (ask(question="x" * 5000), BadRequestError, "ask a shorter question"),
        (
            ask("", question="x" * 5000),
            BadRequestError,
            r"^the prompt is too long: it has \d+ tokens, and this model's maximum context length is \d+ tokens",
        ),
    ],
)
def test_invalid_requests_are_refused_before_the_first_event(built: Path, asked, error, words) -> None:
    async def main() -> None:
        async with running(built) as backend:
            with pytest.raises(error, match=words):
                await anext(backend.generate(asked))
            assert backend._scheduler.flow.num_in_flight == 0
            assert isinstance((await answer(backend, ask()))[1], Done)

    asyncio.run(main())


def test_a_request_beyond_its_timeout_is_ended(built: Path) -> None:
    async def main() -> None:
        engine = FullEngine(loaded(), tail_capacity=900)
        async with running(built, engine, request_timeout_s=0.3) as backend:
            started = time.perf_counter()
            with pytest.raises(TimedOutError):
                await answer(backend, ask(max_new_tokens=600))
            assert time.perf_counter() - started < 10
            await until(lambda: not engine.request_slots)

    asyncio.run(main())


@pytest.mark.parametrize("waits_for", ["tokens", "slot", "context"])
def test_http_requests_beyond_their_timeout_end_in_time_and_are_counted(
    built: Path, monkeypatch, waits_for: str
) -> None:
    async def never(*args: Any) -> None:
        await asyncio.Future()

    if waits_for == "context":
        monkeypatch.setattr(prefixes.Prefixes, "find", never)

    async def main() -> None:
        engine, limits = FullEngine(loaded(), tail_capacity=900), {"request_timeout_s": 0.3}
        running_most = 1 if waits_for == "slot" else 4
        body = {"model": "smollm2-135m@heron", "prompt": "who?", "max_tokens": 600}
        async with running(built, engine, max_concurrent_requests=running_most, **limits) as backend:
            transport = ASGITransport(make_app(backend, settings_of(built, **limits)))
            async with AsyncClient(transport=transport, base_url="http://localhost") as http:
                asked = [http.post("/v1/completions", json={**body, "stream": n % 2 == 0}) for n in range(4)]
                started = time.perf_counter()
                replies = await asyncio.gather(*asked)
                assert time.perf_counter() - started < 10
            assert all('"timeout"' in reply.text for reply in replies)
            assert {reply.status_code for reply in replies} <= ({504} if waits_for == "context" else {200, 504})
            outcomes = await outcomes_of(backend)
            assert "cancelled" not in outcomes
            assert outcomes["timeout"] == 4
            await until(lambda: not engine.request_slots)
            assert backend._scheduler.flow.num_in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_saves_steps_and_changes_nothing_else(built: Path, stream) -> None:
    chat = {"model": "smollm2-135m@heron", "messages": [{"role": "user", "content": "who?"}], "max_tokens": 40}
    chat |= {"stream": stream, "logit_bias": {str(byte): 100 for byte in range(65, 91)}}  # letters, each a token
    chat |= {"stream_options": {"include_usage": True}} if stream else {}

    async def main() -> None:
        engine = FullEngine(loaded())
        async with running(built, engine) as backend:
            transport = ASGITransport(make_app(backend, settings_of(built)))
            async with AsyncClient(transport=transport, base_url="http://localhost") as http:

                async def answered(**more: Any) -> tuple[str, dict[str, Any], int]:
                    """Return the text, the usage, and the number of steps."""
                    before, reply = engine.num_steps, await http.post("/v1/chat/completions", json={**chat, **more})
                    if not stream:
                        body = reply.json()
                        return body["choices"][0]["message"]["content"], body["usage"], engine.num_steps - before
                    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
                    *chunks, last = map(json.loads, lines)
                    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                    return text, last["usage"], engine.num_steps - before

                text, usage, _ = await answered(temperature=2.0, seed=1)
                assert len(set(text)) > 5 and "completion_tokens_details" not in usage
                parts = [{"type": "text", "text": text[:20] + "~" + text[20:]}]
                prediction = {"type": "content", "content": parts}
                same, of_prediction, num_steps = await answered(temperature=2.0, seed=1, prediction=prediction)
                assert same == text and num_steps < 20
                details = of_prediction.pop("completion_tokens_details")
                assert of_prediction == usage
                assert details["accepted_prediction_tokens"] >= 20 and details["rejected_prediction_tokens"] >= 1
                other = {"type": "content", "content": "~~~~~~"}
                same, of_prediction, _ = await answered(temperature=2.0, seed=1, prediction=other)
                assert same == text and of_prediction["completion_tokens_details"]["accepted_prediction_tokens"] < 10

    asyncio.run(main())


def test_contexts_that_do_not_fit_together_take_turns(built: Path) -> None:
    class Small(FullEngine):
        def add_context(self, context_id, artifact, meanwhile):
            if len(self.contexts) == 2:
                raise MemoryPlanError("two contexts are all that fits")
            super().add_context(context_id, artifact)

    async def main() -> None:
        async with running(built) as roomy:
            want = [await answer(roomy, ask(secret)) for secret in SECRETS]
        engine = Small(loaded(), tail_capacity=600)
        async with running(built, engine) as backend:
            for _ in range(3):
                assert [await answer(backend, ask(secret)) for secret in SECRETS] == want
                assert len(engine.contexts) == 2
            together = await asyncio.gather(*(answer(backend, ask("heron")) for _ in range(5)))
            assert set(together) == {want[0]}
            held = [backend.generate(ask(secret, max_new_tokens=400)) for secret in SECRETS[:2]]
            for events in held:
                await anext(events)
            waiting = asyncio.create_task(answer(backend, ask(SECRETS[2])))
            assert not (await asyncio.wait([waiting], timeout=0.2))[0], "both are in use"
            await held[0].aclose()
            assert await waiting == want[2]
            await held[1].aclose()

    asyncio.run(main())


def test_a_broken_engine_is_not_ready_and_recovers(built: Path) -> None:
    async def main() -> None:
        engine = FullEngine(loaded(), tail_capacity=600)
        async with running(built, engine) as backend:
            assert (await backend.health()).ready
            events = backend.generate(ask(max_new_tokens=400))
            await anext(events)
            real = engine.step

            def fail(*args: Any) -> Any:
                raise RuntimeError("the device is gone")

            engine.step = fail  # type: ignore[method-assign]
            with pytest.raises(ServingError, match="the device is gone"):
                async for _ in events:
                    pass
            health = await backend.health()
            assert not health.ready and "the device is gone" in health.why
            with pytest.raises(WorkerLostError):
                await answer(backend, ask())
            engine.step = real  # type: ignore[method-assign]
            async with asyncio.timeout(5):
                while not (await backend.health()).ready:
                    await asyncio.sleep(0.02)
            assert isinstance((await answer(backend, ask()))[1], Done)

    asyncio.run(main())


def test_closing_drains_requests_and_then_ends_them(built: Path) -> None:
    async def main() -> None:
        for drain_s, ending in ((5.0, Done), (0.0, WorkerLostError)):
            engine = FullEngine(loaded(), tail_capacity=600)
            backend = LocalBackend(engine, loaded(), settings_of(built))
            await backend.start()
            events = backend.generate(ask(max_new_tokens=100))
            seen: list[Any] = [await anext(events)]
            closing = asyncio.create_task(backend.close(drain_s))
            try:
                async for event in events:
                    seen.append(event)
            except ServingError as error:
                seen.append(error)
            await closing
            assert isinstance(seen[-1], ending)
            assert all(isinstance(event, Piece) for event in seen[:-1])
            assert engine.is_closed
            assert not (await backend.health()).ready
            with pytest.raises(WorkerLostError):
                await answer(backend, ask())

    asyncio.run(main())


def test_closing_a_backend_ends_all_of_its_threads(built: Path) -> None:
    before = set(threading.enumerate())

    async def main() -> LocalBackend:
        async with LocalBackend(FullEngine(loaded()), loaded(), settings_of(built)) as backend:
            await answer(backend, ask())
        return backend

    backend = asyncio.run(main())  # keep a reference: a collected backend ends its threads anyway
    threads = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("csattn")]
    for thread in threads:
        thread.join(10)
    assert not [thread.name for thread in threads if thread.is_alive()]
    assert not asyncio.run(backend.health()).ready


def test_closing_a_backend_that_was_never_started_closes_its_engine(built: Path) -> None:
    engine = FullEngine(loaded())
    asyncio.run(LocalBackend(engine, loaded(), settings_of(built)).close())
    assert engine.is_closed


def test_drain_time_counts_from_the_start_of_closing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending the builds may take as long again."""
    given: list[float] = []
    end, end_builds = StepThread.close, Builder.close

    async def slowly(self: Builder) -> None:
        await asyncio.sleep(0.2)
        await end_builds(self)

    def noted(self: StepThread, drain_s: float) -> None:
        given.append(drain_s)
        end(self, drain_s)

    monkeypatch.setattr(Builder, "close", slowly)
    monkeypatch.setattr(StepThread, "close", noted)

    async def main() -> None:
        for drain_s in (5.0, 0.1):
            backend = LocalBackend(FullEngine(loaded()), loaded(), settings_of(built))
            await backend.start()
            await backend.close(drain_s)

    asyncio.run(main())
    assert 0.0 < given[0] <= 4.8 and given[1] == 0.0


def test_closing_ends_requests_that_are_not_yet_scheduled(built: Path) -> None:
    """Such requests wait for the tokenizer, or have just been tokenized."""

    async def main() -> None:
        opened = threading.Event()
        backend = LocalBackend(FullEngine(loaded()), loaded(), settings_of(built))
        await backend.start()
        for _ in range(2):
            backend._tokenisers.submit(opened.wait)
        waiting = asyncio.create_task(answer(backend, ask()))
        try:
            await until(lambda: backend._tokenisers._work_queue.qsize() > 0)
            await backend.close(drain_s=0.0)
            async with asyncio.timeout(10):
                with pytest.raises(WorkerLostError, match="shutting down"):
                    await waiting
        finally:
            opened.set()
        assert backend._scheduler.flow.num_in_flight == 0

        for step in ("find", "_drafts"):
            backend = LocalBackend(FullEngine(loaded()), loaded(), settings_of(built))
            await backend.start()
            real = getattr(backend._prefixes, step)

            async def late(*arguments: Any, backend=backend, real=real) -> Any:
                found = await real(*arguments)
                await backend.close(drain_s=0.0)
                return found

            setattr(backend._prefixes, step, late)
            async with asyncio.timeout(10):
                with pytest.raises(WorkerLostError, match="shutting down"):
                    await answer(backend, ask())
            assert backend._scheduler.flow.num_in_flight == 0

    asyncio.run(main())


def test_a_token_id_beyond_the_embedding_is_a_bad_request(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        vocab_size = loaded().geometry.vocab_size
        async with running(built) as backend:
            with monkeypatch.context() as patch:
                patch.setattr(prefixes, "prompt_ids", lambda *_: [1, vocab_size])
                with pytest.raises(BadRequestError, match=f"token id {vocab_size}, .* has ids below {vocab_size}"):
                    await answer(backend, ask(repetition_penalty=1.5))
            assert isinstance((await answer(backend, ask()))[1], Done)

    asyncio.run(main())


def test_an_idle_service_uses_no_cpu(built: Path) -> None:
    async def main() -> None:
        async with running(built) as backend:
            await answer(backend, ask())
            assert await asyncio.to_thread(is_idle, window_s=0.3)

    asyncio.run(main())


def test_metrics_count_requests_tokens_and_engine_state(built: Path) -> None:
    async def main() -> None:
        async with running(built) as backend:
            for secret in SECRETS:
                await answer(backend, replace(ask(secret, max_new_tokens=5), selector="exact"))
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for metric in await backend.metrics()
                for sample in metric.samples
            }
            assert samples["csattn_requests_total", "length"] == 3
            assert samples["csattn_new_tokens_total",] == 15
            assert samples["csattn_ttft_seconds_count",] == 3
            assert samples["csattn_tpot_seconds_count",] == 3
            assert samples["csattn_kv_bytes",] > 3e5
            assert samples["csattn_search_seconds_total",] > 0
            assert samples["csattn_running_requests",] == samples["csattn_queue_length",] == 0
            assert samples["csattn_fidelity_recall_count", "heron"] == 1

    asyncio.run(main())
