"""Turns are kept: prompts begin with what was kept of those before them, and say what they would say without it."""

import asyncio
import errno
import json
import os
import shutil
import threading
import tracemalloc
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from offload.blocks import BlockName
from tests.tiny import byte_tokenizer, loaded, make_model
from workers.engine.cpu_engine import CpuEngine
from workers.serving import kept_rows
from workers.serving.context_build import Builder
from workers.serving.contexts import name_artifact
from workers.serving.kept_rows import BLOCK_ROWS, DIRECTORY, OwnRows, open_kept_rows
from workers.serving.local import LocalBackend
from workers.serving.messages import (
    Ask,
    ContextNotReadyError,
    ContextTooLongError,
    Done,
    Sampling,
    Turn,
    WorkerLostError,
)
from workers.serving.own_contexts import Found, OwnContexts
from workers.serving.residency import Residency
from workers.settings import KeptSettings, Settings, StoreSettings

SEARCH = SearchConfig(keep=0.1, window_len=32)
DOCUMENT = "".join(f"Lamp {n} is {'red' if n % 3 else 'blue'} and burns {n * 7 % 24} hours. " for n in range(23))


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Own contexts are built here, instead of in a process: the stores of those that were."""
    made: list[Path] = []

    async def build(self: Builder, source: list[str], store: Path, tell: Any, nice: int) -> dict[str, Any]:
        ids = np.array(json.loads(Path(source[-1]).read_text()), np.int32)
        made.append(store)
        report = await asyncio.to_thread(build_artifact, loaded(), ids, preset("default"), store)
        return {"artifact": report.artifact_id, "context_len": len(ids)}

    monkeypatch.setattr(Builder, "build", build)
    return made


def make_backend(
    store: Path, model: LoadedModel | None = None, search: SearchConfig = SEARCH, **kept: Any
) -> LocalBackend:
    model = model or loaded()
    engine = CpuEngine(model, max_rows=16, num_slots=6, tail_capacity=700, num_threads=1)
    settings = Settings(
        store=StoreSettings(path=store), search=search, kept=KeptSettings(**{"context_tokens": 300, **kept})
    )
    return LocalBackend(engine, model, settings)


def turns_of(*texts: str) -> tuple[Turn, ...]:
    """The user's and the assistant's, in turn."""
    return tuple(Turn("assistant" if number % 2 else "user", text) for number, text in enumerate(texts))


def ask(*texts: str, new: int = 20, salt: str = "", **more: Any) -> Ask:
    named = {name: more.pop(name) for name in ("context", "prompt", "echo", "keep", "selector") if name in more}
    turns = {} if "prompt" in named else {"turns": turns_of(*texts)}
    sampling = Sampling(max_new_tokens=new, **more)
    return Ask(**{"request_id": "1", "context": "", **turns, **named}, cache_salt=salt, sampling=sampling)


async def answer(backend: LocalBackend, asked: Ask) -> tuple[str, Done]:
    text = ""
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Done):
                return text, event
            text += event.text
    raise AssertionError("events end with Done")


def computed(done: Done) -> int:
    return done.context_tokens + done.question_tokens - done.cached_tokens


def answers(store: Path, *asks: Ask, **options: Any) -> list[tuple[str, Done]]:
    """Of a service that lives as long as these, one after another."""

    async def main() -> list[tuple[str, Done]]:
        async with make_backend(store, **options) as backend:
            return [await answer(backend, asked) for asked in asks]

    return asyncio.run(main())


def afresh(tmp_path: Path, asked: Ask, **options: Any) -> str:
    """What is said where nothing is kept."""
    return answers(tmp_path / "fresh", asked, memory_bytes=0, **options)[0][0]


def files_of(store: Path) -> list[Path]:
    return sorted((store / DIRECTORY).glob("*.block"))


# long enough for blocks: a byte is a token
FIRST, SECOND = "Tell me of lamps, and of what they are made. " * 3, "And of their hours? " * 4


def test_a_turn_computes_what_is_new_and_says_the_same(tmp_path) -> None:
    """In one service, and by another that begins where the first was ended."""
    said, texts = "", [FIRST]
    for turn in range(4):
        [(said, done)] = answers(tmp_path / "kept", ask(*texts), context_tokens=680)
        assert said == afresh(tmp_path, ask(*texts), context_tokens=680)
        new = len(FIRST) + 40 if turn == 0 else len(SECOND) + 40
        assert computed(done) <= new + BLOCK_ROWS, f"turn {turn} computed {computed(done)}"
        texts += [said, SECOND]


def test_a_conversation_in_one_service_finds_its_turns_in_memory(tmp_path) -> None:
    async def main() -> None:
        async with make_backend(tmp_path, disk_bytes=0) as backend:
            first, done = await answer(backend, ask(FIRST))
            assert done.cached_tokens == 0
            _, done = await answer(backend, ask(FIRST, first, SECOND))
            assert computed(done) <= len(SECOND) + 40 + BLOCK_ROWS
            one, other = ask(FIRST, first, SECOND + "!"), ask(FIRST, first, "No: " + SECOND)
            together = await asyncio.gather(answer(backend, one), answer(backend, other))
            for (said, done), branch in zip(together, (one, other), strict=True):
                assert computed(done) <= len(SECOND) + 50 + BLOCK_ROWS and done.cached_tokens > len(FIRST)
                assert said == (await asyncio.to_thread(afresh, tmp_path, branch))
            counts = backend._beginnings.kept.counts
            assert counts.disk_blocks == 0 and counts.memory_blocks < 12, "branches share what they have in common"

    asyncio.run(main())


def test_a_long_beginning_becomes_a_context_that_others_find(tmp_path, builds) -> None:
    question = ask(DOCUMENT + "Which are red?"), ask(DOCUMENT + "How many hours does lamp 3 burn?")
    (_, first), (said, second) = answers(tmp_path / "kept", *question)
    assert len(builds) == 1 and first.context_tokens == second.context_tokens == 512
    assert first.cached_tokens == 0 and second.cached_tokens >= second.context_tokens
    assert computed(second) <= len("How many hours does lamp 3 burn?") + 30 + BLOCK_ROWS
    [(again, done)] = answers(tmp_path / "kept", question[1])
    assert again == said and done.cached_tokens >= second.cached_tokens and len(builds) == 1
    [(other, done)] = answers(tmp_path / "other", question[1])
    assert other == said and computed(done) == done.context_tokens + done.question_tokens and len(builds) == 2


def test_many_that_come_at_once_with_one_document_wait_for_one_build(tmp_path, builds) -> None:
    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            said = await asyncio.gather(*(answer(backend, ask(DOCUMENT + "Which are red?")) for _ in range(4)))
            assert len({text for text, _ in said}) == 1 and len(builds) == 1

    asyncio.run(main())


def test_nothing_is_built_for_those_who_left_before_it_began(tmp_path, builds, monkeypatch) -> None:
    """And who comes again, or has stayed, has it built all the same."""
    begun, may_end, real = asyncio.Event(), asyncio.Event(), Builder.build

    async def wait(self: Builder, *args: Any, **kwargs: Any) -> dict[str, Any]:
        begun.set()
        await may_end.wait()
        return await real(self, *args, **kwargs)

    monkeypatch.setattr(Builder, "build", wait)

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            own, salts = backend._beginnings._own_contexts, ["left", "left", "left", "back", "stayed", "stayed"]
            coming = [asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt="first")))]
            await begun.wait()
            for salt in salts:
                coming.append(asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt=salt))))
            while len(own._builds) < len({"first", *salts}):
                await asyncio.sleep(0.01)
            for task in coming[:-1]:
                task.cancel()
            await asyncio.wait(coming[:-1])
            back = asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt="back")))
            may_end.set()
            said = {text for text, _ in await asyncio.gather(back, coming[-1])}
            assert len(said) == 1 and builds == [own._of(salt) for salt in ("first", "stayed", "back")]

    asyncio.run(main())


def test_no_build_begins_in_a_service_that_closes(tmp_path, builds, monkeypatch) -> None:
    """Not for who was looking for a context meanwhile, nor for who comes then; they are told."""
    is_looking, may_go_on, real = threading.Event(), threading.Event(), OwnContexts._longest

    def look(*args: Any) -> Found:
        is_looking.set()
        may_go_on.wait(10.0)
        return real(*args)

    monkeypatch.setattr(OwnContexts, "_longest", look)

    async def main() -> None:
        backend = make_backend(tmp_path)
        await backend.start()
        early = asyncio.create_task(answer(backend, ask(DOCUMENT)))
        await asyncio.to_thread(is_looking.wait)
        closing = asyncio.create_task(backend.close(drain_s=30.0))
        await asyncio.sleep(0)
        late = answer(backend, ask(DOCUMENT))
        with pytest.raises(WorkerLostError, match="shutting down"):
            await asyncio.wait_for(late, 5.0)
        may_go_on.set()
        with pytest.raises(WorkerLostError, match="shutting down"):
            await early
        await closing
        with pytest.raises(WorkerLostError, match="shutting down"):
            await backend.register("a", DOCUMENT)
        assert not builds

    asyncio.run(main())


def test_a_salt_keeps_what_it_leaves_for_itself(tmp_path, builds) -> None:
    """Rows and contexts; and the store of another salt's contexts tells nothing to who builds."""
    long, short = DOCUMENT + "Which are red?", FIRST
    asks = [ask(text, salt=salt) for text in (short, long) for salt in ("mine", "yours", "")]
    first = answers(tmp_path, *asks)
    assert all(done.cached_tokens == 0 for _, done in first)
    assert len(builds) == len(set(builds)) == 3
    again = answers(tmp_path, *asks)
    assert all(done.cached_tokens > len(FIRST) // 2 for _, done in again) and len(builds) == 3
    assert [text for text, _ in again] == [text for text, _ in first]
    names = " ".join(str(path) for path in tmp_path.rglob("*"))
    assert "mine" not in names and b"mine" not in b"".join(path.read_bytes() for path in files_of(tmp_path))


def test_tenants_with_one_text_and_secrets_of_their_own_stay_apart(tmp_path) -> None:
    """240 requests of 8, beside each other: each is answered as if it were alone, and finds its own alone."""
    tenants = [f"tenant {number}" for number in range(8)]
    asks = {tenant: ask(f"{FIRST} The word is {tenant[::-1]}.", new=6, salt=tenant) for tenant in tenants}
    want = {tenant: afresh(tmp_path, asks[tenant]) for tenant in tenants}

    async def main() -> None:
        async with make_backend(tmp_path / "kept") as backend:
            for tenant in tenants:
                said, done = await answer(backend, asks[tenant])
                assert said == want[tenant] and done.cached_tokens == 0
            order = tenants * 30
            together = await asyncio.gather(*(answer(backend, asks[tenant]) for tenant in order[:60]))
            together += [each for tenant in order[60:] for each in [await answer(backend, asks[tenant])]]
            for tenant, (said, done) in zip(order, together, strict=True):
                assert said == want[tenant] and done.cached_tokens >= 128

    asyncio.run(main())


def test_rows_are_kept_apart_by_all_that_decides_them(tmp_path) -> None:
    """Context or none, how it is read, and the model."""
    long = DOCUMENT + "Which are red?" + FIRST
    answers(tmp_path, ask(long), ask(FIRST))
    for asked in (ask(long, keep=0.5), ask(long, selector="full")):
        said, done = answers(tmp_path, asked)[0]
        assert done.cached_tokens == done.context_tokens, "the context is the same, the rows behind it are not"
    other = wrap_model(make_model(seed=1), byte_tokenizer(), "another")
    [(said, done)] = answers(tmp_path, ask(FIRST), model=other)
    assert done.cached_tokens == 0 and said == afresh(tmp_path, ask(FIRST), model=other)
    assert answers(tmp_path, ask(FIRST))[0][1].cached_tokens > 0


def test_a_hash_that_two_prompts_share_finds_neither_s_rows_for_the_other(tmp_path, monkeypatch) -> None:
    """With every block's key the same, and with keys that tell only how long a prompt is."""

    class Stub:
        def __init__(self, data: bytes = b"") -> None:
            self.num_updates = 0

        def update(self, data: bytes) -> None:
            self.num_updates += 1

        def hexdigest(self) -> str:
            return f"{'same' if by == 'none' else self.num_updates}"

    texts = [FIRST, FIRST[:-9] + "elephants", "x" + FIRST, "y" + FIRST]
    want = [afresh(tmp_path, ask(text)) for text in texts]
    for by in ("none", "length"):
        monkeypatch.setattr(kept_rows, "new_hash", Stub)
        store = tmp_path / by
        for _ in range(2):
            got = answers(store, *(ask(text) for text in texts))
            assert [said for said, _ in got] == want
        assert any(done.cached_tokens for _, done in got), "what was stored is found by whose it is"


def test_a_long_prompt_of_which_nothing_is_kept_takes_no_memory(tmp_path) -> None:
    settings = Settings(store=StoreSettings(path=tmp_path))
    kept, token_ids = open_kept_rows(loaded(), settings), list(range(64_000))
    tracemalloc.start()
    try:
        assert kept.num_kept(b"mine", token_ids) == 0 and kept.find(b"mine", token_ids).num_found == 0
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
        kept.close()


def test_tokens_are_looked_at_when_a_block_has_become_whole(tmp_path, monkeypatch) -> None:
    """And of its block alone the name is made."""
    kept: list[int] = []
    named: list[BlockName] = []
    real = OwnRows.keep

    def keep(self: OwnRows, token_ids: Any, read_rows: Any) -> None:
        kept.append(len(token_ids))
        real(self, token_ids, read_rows)

    def name(*parts: Any) -> BlockName:
        named.append(BlockName(*parts))
        return named[-1]

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            events = backend.generate(ask(FIRST, new=200))
            async with aclosing(events):
                await anext(events)
                monkeypatch.setattr(OwnRows, "keep", keep)
                monkeypatch.setattr(kept_rows, "BlockName", name)
                async for _ in events:
                    pass

    asyncio.run(main())
    assert 2 <= len(kept) <= 4 and len(kept) == len(named), kept


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "swapped"])
def test_a_damaged_file_is_a_fresh_prefill(tmp_path, damage) -> None:
    store = tmp_path / "kept"
    [(want, _)] = answers(store, ask(FIRST + SECOND))
    first, second, *_ = files_of(store)
    if damage == "bit":
        data = bytearray(first.read_bytes())
        data[len(data) // 2] ^= 1
        first.write_bytes(bytes(data))
    elif damage == "swapped":
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
    elif damage == "gone":
        first.unlink()
    else:
        first.write_bytes(first.read_bytes()[: 1000 if damage == "cut" else 0])
    [(said, done)] = answers(store, ask(FIRST + SECOND))
    assert said == want and computed(done) >= BLOCK_ROWS
    [(said, done)] = answers(store, ask(FIRST + SECOND))
    assert said == want and computed(done) <= BLOCK_ROWS, "what was damaged is there again"


def test_a_damaged_context_is_made_again(tmp_path, builds) -> None:
    asked = ask(DOCUMENT + "Which are red?")
    [(want, _)] = answers(tmp_path, asked)
    [kv] = builds[0].glob("*/layer-001.kv.safetensors")
    data = bytearray(kv.read_bytes())
    data[-100] ^= 1
    kv.chmod(0o644)
    kv.write_bytes(bytes(data))
    [(said, again)] = answers(tmp_path, asked)
    assert said == want and len(builds) == 2
    assert again.cached_tokens < again.context_tokens


@pytest.mark.parametrize("damage", ["gone", "index"])
def test_a_registered_context_that_cannot_be_loaded_any_more_is_done_without(tmp_path, builds, damage) -> None:
    asked = ask(DOCUMENT + "Which are red?")
    want = afresh(tmp_path, asked)
    store = tmp_path / "kept"
    [made] = (path for path in builds.pop().iterdir() if path.is_dir())
    shutil.copytree(made, store / made.name)
    name_artifact(store, "lamps", made.name, "float32")

    async def main() -> None:
        async with make_backend(store) as backend:
            said, done = await answer(backend, asked)
            assert said == want and done.cached_tokens == done.context_tokens == 512 and not builds
            await backend.drop(backend.standing().held)
            if damage == "gone":
                shutil.rmtree(store / made.name)
            else:
                index = next((store / made.name).glob("*index*"))
                index.chmod(0o644)
                index.write_bytes(b"")
            for _ in range(2):
                assert (await answer(backend, asked))[0] == want
            assert len(builds) == 1, "it brings its own"
            [info] = await backend.contexts()
            assert info.state == "failed" or damage == "index", "a manifest does not tell what its index is"
            if damage == "gone":
                assert "there is no artifact" in info.what
            with pytest.raises(ContextNotReadyError):
                await answer(backend, ask("Which are red?", context="lamps"))

    asyncio.run(main())


def test_a_full_disk_changes_no_answer(tmp_path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    want = afresh(tmp_path, ask(FIRST))
    monkeypatch.setattr(Path, "replace", full)
    got = answers(tmp_path / "kept", ask(FIRST), ask(FIRST))
    assert [said for said, _ in got] == [want, want] and got[1][1].cached_tokens > 0, "memory has it"
    assert not list((tmp_path / "kept" / DIRECTORY).iterdir())


def test_a_context_that_cannot_be_built_is_a_sentence(tmp_path, monkeypatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ArtifactError("the disk is full")

    monkeypatch.setattr(Builder, "build", fail)
    with pytest.raises(ContextNotReadyError, match="made of the prompt's beginning: the disk is full"):
        answers(tmp_path, ask(DOCUMENT))
    assert not list((tmp_path / DIRECTORY).rglob("*.json"))


def test_a_prompt_that_fits_is_answered_without_the_context_that_cannot_be_built(tmp_path, monkeypatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ArtifactError("the disk is full")

    asked = ask(FIRST * 4)
    want = afresh(tmp_path, asked, context_tokens=680)
    monkeypatch.setattr(Builder, "build", fail)
    [(said, done)] = answers(tmp_path / "kept", asked)
    assert said == want and done.context_tokens == 0 and done.question_tokens > 300


def test_what_the_model_has_no_positions_for_is_refused_before_anything_is_built(tmp_path, builds) -> None:
    with pytest.raises(ContextTooLongError, match="1,024"):
        answers(tmp_path, ask(DOCUMENT + FIRST * 2))
    assert not builds


def test_rows_of_one_who_left_are_kept(tmp_path) -> None:
    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            events = backend.generate(ask(FIRST, new=200))
            for _ in range(60):
                await anext(events)
            await events.aclose()
            _, done = await answer(backend, ask(FIRST))
            assert computed(done) <= BLOCK_ROWS
            backend._beginnings.kept.flush()
            assert len(files_of(tmp_path)) >= (len(FIRST) + 50) // BLOCK_ROWS

    asyncio.run(main())


def test_prompts_and_scores_of_them(tmp_path) -> None:
    """A prompt whose tokens are scored is fed whole; text and tokens begin alike."""
    ids = tuple(loaded().tokenizer(FIRST).input_ids)
    asks = ask(prompt=FIRST), ask(prompt=ids), ask(prompt=FIRST, echo=True, top_logprobs=1, new=5)
    (said, first), (again, second), (echoed, third) = answers(tmp_path, *asks)
    assert first.cached_tokens == third.cached_tokens == 0 and computed(second) <= BLOCK_ROWS
    assert said == again and echoed == FIRST + said[: len(echoed) - len(FIRST)]


def test_every_token_of_a_long_prompt_has_its_score(tmp_path, builds) -> None:
    """So none of it becomes a context, nor comes from what is kept."""
    prompt = FIRST * 3

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            for _ in range(2):
                events = backend.generate(ask(prompt=prompt, echo=True, top_logprobs=0, new=2))
                async with aclosing(events):
                    scores = [score async for event in events if not isinstance(event, Done) for score in event.scores]
                assert (
                    "".join(score.text for score in scores[: len(prompt)]) == prompt and len(scores) == len(prompt) + 2
                )

    asyncio.run(main())
    assert not builds
    with pytest.raises(ContextTooLongError, match="700 rows of its own"):
        answers(tmp_path, ask(prompt=DOCUMENT, echo=True, top_logprobs=0))


@pytest.mark.parametrize("selector", ["h2o", "exact"])
def test_selectors_that_remember_keep_nothing(tmp_path, selector) -> None:
    asked = ask(DOCUMENT + FIRST, selector=selector)
    (said, _), (again, done) = answers(tmp_path, asked, asked)
    assert said == again and done.cached_tokens == done.context_tokens and not files_of(tmp_path)


def test_with_a_search_period_nothing_is_kept(tmp_path) -> None:
    answers(tmp_path, ask(FIRST), search=SearchConfig(keep=0.1, search_period=3))
    assert not files_of(tmp_path)


def test_the_disk_and_the_contexts_keep_to_their_budgets(tmp_path, builds) -> None:
    num_bytes = files_bytes(tmp_path / "one", ask(FIRST))
    budget = 5 * num_bytes
    asks = [ask(f"{n} {FIRST}") for n in range(8)]
    answers(tmp_path / "kept", *asks, disk_bytes=budget)
    assert sum(path.stat().st_size for path in files_of(tmp_path / "kept")) <= budget
    documents = [ask(f"{n} {DOCUMENT}") for n in range(4)]
    answers(tmp_path / "kept", *documents, context_bytes=0)
    left = [path for path in builds[0].iterdir() if path.is_dir()]
    assert len(builds) == 4 and len(left) == 1, "those in use, and the newest, stay"


def test_what_a_kill_left_is_removed(tmp_path, builds) -> None:
    first, second = ask(DOCUMENT + "Which are red?"), ask("And now: " + DOCUMENT)
    answers(tmp_path, first)
    [place] = builds
    gone, old, new = place / "gone-0123", place / "tokens-0123.json", place / "tokens-4567.json"
    gone.mkdir()
    for path in (gone / "layer-000.kv.safetensors", old, new):
        path.write_bytes(b"[]")
    os.utime(old, (1e9, 1e9))
    answers(tmp_path, second)
    assert new.exists() and not gone.exists() and not old.exists(), "the new one may be another service's"
    assert len([path for path in place.iterdir() if path.is_dir()]) == 2


def test_where_the_oldest_is_in_use_another_makes_room(tmp_path, builds, monkeypatch) -> None:
    answers(tmp_path, ask(DOCUMENT))
    [used] = (path for path in builds[0].iterdir() if path.is_dir())
    num_bytes = sum(path.stat().st_size for path in used.iterdir())
    monkeypatch.setattr(Residency, "is_used", lambda self, path: path == used)
    answers(tmp_path, *(ask(f"{n} {DOCUMENT}") for n in range(2)), context_bytes=int(2.5 * num_bytes))
    left = [path for path in builds[0].iterdir() if path.is_dir()]
    assert len(builds) == 3 and len(left) == 2 and used in left


def files_bytes(store: Path, asked: Ask) -> int:
    """Of a block, with its label."""
    answers(store, asked)
    return max(path.stat().st_size for path in files_of(store))
