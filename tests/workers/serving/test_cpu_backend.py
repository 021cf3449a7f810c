"""The backend over the CPU engine: a request's answer is bitwise independent of the other requests."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from csattn.artifact import open_artifact
from csattn.config import SearchConfig
from offload import budget
from offload.codecs.formats import KvFormat
from tests.tiny import loaded
from tests.workers.serving.artifacts import SECRETS, build, text_of
from tests.workers.serving.test_local import answer, ask
from workers.engine.cpu.engine import CpuEngine
from workers.serving.context_file import ContextFile
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, BadRequestError, Done
from workers.session import csattn_session
from workers.settings import KeptSettings, Settings, StoreSettings

SEARCH = SearchConfig(keep=0.1, window_len=32, lookahead=1)

MEASURED = (
    *("fidelity_recall_count", "fidelity_mass_count", "fidelity_mass_sum"),
    *("search_seconds_total", "kv_bytes", "index_bytes"),
)


def backend_of(store: Path, search: SearchConfig = SEARCH, kv_format: KvFormat | None = None) -> LocalBackend:
    engine = CpuEngine(loaded(), max_rows=16, max_requests=16, tail_capacity=128, num_threads=2, kv_format=kv_format)
    kept = KeptSettings(disk_bytes=0)  # the tests share the store
    return LocalBackend(engine, loaded(), Settings(store=StoreSettings(path=store), search=search, kept=kept))


def kinds() -> Iterator[Ask]:
    """Requests with different contexts, lengths, shares of rows, selectors and sampling."""
    others = "exact", "full", "window", "h2o", "sparq", "magicpig"
    selectors = [name for other in others for name in ("csattn", other)]
    for n in range(16):
        yield ask(
            SECRETS[n % 3],
            "who is it " + "? " * (2 * n),
            5 + n,
            temperature=0.8 * (n % 2),
            seed=n,
            top_logprobs=(None, 2)[n % 4 == 3],
            selector=selectors[n % len(selectors)],
            lookahead=n % 3 % 2,
            keep=(0.05, 0.3)[n % 2],
            top_k=(0, 40)[n % 3 == 1],
            min_p=(0.0, 0.01)[n % 5 == 1],
            frequency_penalty=(0.0, 0.5)[n % 4 == 1],
            presence_penalty=(0.0, 1.0)[n % 7 == 2],
            repetition_penalty=(1.0, 1.2)[n % 5 == 2],
            logit_bias=((), ((7, 2.0), (255, -1.0)))[n % 6 == 3],
            schema=(None, {"type": "object"})[n % 8 == 5],
        )


def test_sixteen_concurrent_answers_equal_each_alone(built: Path) -> None:
    async def main() -> None:
        async with backend_of(built) as backend:
            alone = [await answer(backend, kind) for kind in kinds()]
            assert await asyncio.gather(*(answer(backend, kind) for kind in kinds())) == alone
            samples = [sample for metric in await backend.metrics() for sample in metric.samples]
            by_name = {name: [s.value for s in samples if s.name == f"csattn_{name}"] for name in MEASURED}
            assert sum(by_name["fidelity_recall_count"]) == sum(by_name["fidelity_mass_count"]) > 1
            assert 0 < sum(by_name["fidelity_mass_sum"]) <= sum(by_name["fidelity_mass_count"])
            assert min(by_name["search_seconds_total"] + by_name["kv_bytes"] + by_name["index_bytes"]) > 0

    asyncio.run(main())


def test_quantized_contexts_take_turns_in_limited_memory(built: Path, monkeypatch) -> None:
    """Memory has room for two of the three contexts."""

    async def main() -> None:
        async with backend_of(built, kv_format=KvFormat.parse("float16")) as backend:
            want = [await answer(backend, ask(secret)) for secret in SECRETS]
            limit = backend._engine.counts().kv_bytes * 5 // 6
        backend = backend_of(built, kv_format=KvFormat.parse("float16"))
        engine = backend._engine
        left = lambda: budget.SPARE_BYTES + limit - engine.counts().kv_bytes  # noqa: E731
        monkeypatch.setattr(budget, "host_memory_bytes", left)
        async with backend:
            for _ in range(2):
                assert [await answer(backend, ask(secret)) for secret in SECRETS] == want
                assert len(engine._contexts) == 2
            held = [backend.generate(ask(secret, max_new_tokens=100)) for secret in SECRETS[:2]]
            for events in held:
                await anext(events)
            waiting = asyncio.create_task(answer(backend, ask(SECRETS[2])))
            assert not (await asyncio.wait([waiting], timeout=0.2))[0], "both are in use"
            for events in held:
                await events.aclose()
            assert await waiting == want[2]

    asyncio.run(main())


@pytest.mark.parametrize("selector", ["csattn", "full"])
def test_the_services_text_equals_a_sessions_at_keep_1(built: Path, selector) -> None:
    """If every row is read, the text is that of `csattn generate`."""
    search = SearchConfig(keep=1.0, window_len=32, lookahead=1)
    path = built / str(ContextFile(built).read()["heron"].artifact_id)
    with open_artifact(path) as artifact, csattn_session(loaded(), artifact, search, selector) as session:
        arguments = session.ask("who is it?")
        with torch.inference_mode():
            whole = loaded().model.generate(**arguments, max_new_tokens=30, do_sample=False)
    want = loaded().tokenizer.decode(whole[0, arguments["input_ids"].shape[1] :], skip_special_tokens=True)

    async def main() -> tuple[str, Done]:
        async with backend_of(built, search) as backend:
            return await answer(backend, ask("heron", "who is it?", 30, selector=selector))

    text, done = asyncio.run(main())
    assert text == want
    assert done.context_tokens + done.question_tokens == arguments["input_ids"].shape[1]


def test_a_model_with_its_own_indexer_is_served(tmp_path: Path) -> None:
    """It answers from a context and from kept rows; an unsupported selector is refused, and other requests go on."""
    model = loaded("deepseek_v32")
    name_artifact(tmp_path, "heron", build(tmp_path, text_of("heron"), model=model), "float32")
    engine = CpuEngine(model, max_rows=8, max_requests=4, tail_capacity=700, num_threads=2)
    settings = Settings(store=StoreSettings(path=tmp_path), search=SEARCH, kept=KeptSettings(disk_bytes=0))

    async def main() -> None:
        async with LocalBackend(engine, model, settings) as backend:
            asks = [ask("heron", "who is it " + "? " * n, 12, keep=keep) for n, keep in ((0, 0.02), (70, 1.0))]
            alone = [await answer(backend, each) for each in asks]
            with pytest.raises(BadRequestError, match="selector 'quest' has no effect"):
                await answer(backend, replace(asks[0], selector="quest"))
            assert await asyncio.gather(*(answer(backend, each) for each in asks)) == alone
            done = [event async for event in backend.generate(asks[1])][-1]
            assert isinstance(done, Done)
            assert done.cached_tokens > done.context_tokens, "rows of the question are there already"

    asyncio.run(main())
