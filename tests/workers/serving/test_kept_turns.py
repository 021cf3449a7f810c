"""Rows of turns are kept: a prompt reuses those of earlier prompts, and its answer is the same as without them."""

import asyncio
import errno
import os
import tracemalloc
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from csattn.config import SearchConfig
from csattn.models.loader import wrap_model
from offload.blocks import BlockName
from tests.tiny import byte_tokenizer, loaded, make_model
from tests.workers.serving.prompting import (
    DOCUMENT,
    FIRST,
    SECOND,
    afresh,
    answer,
    answers,
    ask,
    computed,
    files_of,
    flush,
    make_backend,
)
from workers.serving import kept_rows
from workers.serving.kept_rows import BLOCK_ROWS, KeptRows, open_prefix_cache, row_identity
from workers.serving.kept_store import DIRECTORY
from workers.serving.messages import Ask, ContextTooLongError, Done
from workers.settings import BuildSettings, EngineSettings, KeptSettings, Settings, StoreSettings

pytestmark = pytest.mark.usefixtures("builds")  # build in this process


def test_a_turn_computes_only_new_tokens_and_answers_the_same(tmp_path) -> None:
    """Each turn has a new service, over what the services before have stored."""
    said, texts = "", [FIRST]
    for turn in range(4):
        [(said, done)] = answers(tmp_path / "kept", ask(*texts), context_tokens=680)
        assert said == afresh(tmp_path, ask(*texts), context_tokens=680)
        new = len(FIRST) + 40 if turn == 0 else len(SECOND) + 40
        assert computed(done) <= new + BLOCK_ROWS, f"turn {turn} computed {computed(done)}"
        texts += [said, SECOND]


def test_a_conversation_reuses_its_turns_from_memory(tmp_path) -> None:
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
            counts = backend._prefixes.cache.blocks.counts
            assert counts.disk_blocks == 0 and counts.memory_blocks < 12, "branches share what they have in common"

    asyncio.run(main())


def test_kept_rows_and_contexts_are_separated_by_salt(tmp_path, builds) -> None:
    """Both rows and contexts: each salt has a store of its own, and neither file names nor rows contain the salt."""
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


def test_eight_tenants_reuse_only_their_own_rows(tmp_path) -> None:
    """240 requests of 8 tenants, 60 of them at once: each is answered as if alone, and finds only its tenant's rows."""
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


def test_kept_rows_are_separated_by_context_keep_selector_and_model(tmp_path) -> None:
    """Rows are not reused if any of these differs."""
    long = DOCUMENT + "Which are red?" + FIRST
    answers(tmp_path, ask(long), ask(FIRST))
    for asked in (ask(long, keep=0.5), ask(long, selector="full")):
        said, done = answers(tmp_path, asked)[0]
        assert done.cached_tokens == done.context_tokens, "the context is the same, the rows behind it are not"
    other = wrap_model(make_model(seed=1), byte_tokenizer(), "another")
    [(said, done)] = answers(tmp_path, ask(FIRST), model=other)
    assert done.cached_tokens == 0 and said == afresh(tmp_path, ask(FIRST), model=other)
    assert answers(tmp_path, ask(FIRST))[0][1].cached_tokens > 0


def test_hash_collisions_never_return_another_prompts_rows(tmp_path, monkeypatch) -> None:
    """Tried with one key for all blocks, and with keys that depend only on the length of a prompt."""

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


def test_looking_up_a_long_unknown_prompt_takes_little_memory(tmp_path) -> None:
    settings = Settings(store=StoreSettings(path=tmp_path))
    kept, token_ids = open_prefix_cache(loaded(), settings), list(range(64_000))
    tracemalloc.start()
    try:
        assert kept.num_kept(b"mine", token_ids) == 0 and kept.find(b"mine", token_ids).num_found == 0
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
        kept.close()


def test_the_block_records_of_a_long_prompt_take_little_memory(tmp_path) -> None:
    """The rows themselves, which have a budget of their own, take a byte here."""
    kept = open_prefix_cache(loaded(), Settings(store=StoreSettings(path=tmp_path), kept=KeptSettings(disk_bytes=0)))
    own = kept.find(b"mine", [])
    tracemalloc.start()
    try:
        own.keep(range(64_000), lambda start, stop: lambda: torch.zeros(1, dtype=torch.uint8))
        flush(kept)
        assert kept.blocks.counts.memory_blocks == 1000 and tracemalloc.get_traced_memory()[0] < 4_000_000
        assert kept.num_kept(b"mine", range(64_001)) == 64_000
    finally:
        tracemalloc.stop()
        kept.close()


def test_kept_rows_use_at_most_a_quarter_of_the_free_memory(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(kept_rows, "host_memory_bytes", lambda: 4 * 100)
    with closing(
        open_prefix_cache(loaded(), Settings(store=StoreSettings(path=tmp_path), kept=KeptSettings(disk_bytes=0)))
    ) as kept:
        kept.find(b"mine", []).keep(range(640), lambda *_: lambda: torch.zeros(30, dtype=torch.uint8))
        flush(kept)
        assert kept.blocks.counts.memory_blocks == 3
    assert "GiB, but only 100 B is used: a quarter of the free memory" in caplog.text


def test_rows_are_kept_once_per_complete_block(tmp_path, monkeypatch) -> None:
    """Each time, only the new block's name is made."""
    kept: list[int] = []
    named: list[BlockName] = []
    real = KeptRows.keep

    def keep(self: KeptRows, token_ids: Any, read_rows: Any) -> None:
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
                monkeypatch.setattr(KeptRows, "keep", keep)
                monkeypatch.setattr(kept_rows, "BlockName", name)
                async for _ in events:
                    pass

    asyncio.run(main())
    assert 2 <= len(kept) <= 4 and len(kept) == len(named), kept


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "swapped"])
def test_a_damaged_block_is_computed_and_stored_again(tmp_path, damage) -> None:
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


def test_a_full_disk_changes_no_answer(tmp_path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    want = afresh(tmp_path, ask(FIRST))
    monkeypatch.setattr(Path, "replace", full)
    got = answers(tmp_path / "kept", ask(FIRST), ask(FIRST))
    assert [said for said, _ in got] == [want, want] and got[1][1].cached_tokens > 0, "memory has it"
    assert not list((tmp_path / "kept" / DIRECTORY).iterdir())


def test_rows_of_a_cancelled_request_are_kept(tmp_path) -> None:
    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            events = backend.generate(ask(FIRST, new=200))
            for _ in range(60):
                await anext(events)
            await events.aclose()
            await asyncio.to_thread(flush, backend._prefixes.cache)
            _, done = await answer(backend, ask(FIRST))
            assert computed(done) <= BLOCK_ROWS
            flush(backend._prefixes.cache)
            assert len(files_of(tmp_path)) >= (len(FIRST) + 50) // BLOCK_ROWS

    asyncio.run(main())


def test_a_scored_prompt_is_computed_whole_and_token_ids_reuse_text_rows(tmp_path) -> None:
    """A prompt of token ids has the identity of its text."""
    ids = tuple(loaded().tokenizer(FIRST).input_ids)
    asks = ask(prompt=FIRST), ask(prompt=ids), ask(prompt=FIRST, echo=True, top_logprobs=1, new=5)
    (said, first), (again, second), (echoed, third) = answers(tmp_path, *asks)
    assert first.cached_tokens == third.cached_tokens == 0 and computed(second) <= BLOCK_ROWS
    assert said == again and echoed == FIRST + said[: len(echoed) - len(FIRST)]


def test_echo_scores_every_token_of_a_long_prompt(tmp_path, builds) -> None:
    """No part of the prompt becomes a context or comes from kept rows."""
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
    with pytest.raises(ContextTooLongError, match="room for 701 of prompt and answer together"):
        answers(tmp_path, ask(prompt=DOCUMENT, echo=True, top_logprobs=0))


@pytest.mark.parametrize("selector", ["h2o", "exact"])
def test_stateful_selectors_keep_no_rows(tmp_path, selector) -> None:
    asked = ask(DOCUMENT + FIRST, selector=selector)
    (said, _), (again, done) = answers(tmp_path, asked, asked)
    assert said == again and done.cached_tokens == done.context_tokens and not files_of(tmp_path)


def test_with_a_search_period_no_rows_are_kept(tmp_path) -> None:
    answers(tmp_path, ask(FIRST), search=SearchConfig(keep=0.1, search_period=3))
    assert not files_of(tmp_path)


def test_kept_rows_on_disk_stay_within_their_budget(tmp_path) -> None:
    num_bytes = files_bytes(tmp_path / "one", ask(FIRST))
    budget = 5 * num_bytes
    asks = [ask(f"{n} {FIRST}") for n in range(8)]
    answers(tmp_path / "kept", *asks, disk_bytes=budget)
    assert sum(path.stat().st_size for path in files_of(tmp_path / "kept")) <= budget


def files_bytes(store: Path, asked: Ask) -> int:
    """Answer, and return the size of the largest block file, with its label."""
    answers(store, asked)
    return max(path.stat().st_size for path in files_of(store))


def test_row_identity_depends_on_all_where_faster() -> None:
    """With `all_where_faster`, steps attend to more rows: requests without it must not reuse theirs."""
    settings = [Settings(engine=EngineSettings(placement="device", all_where_faster=x)) for x in (False, True)]
    some, every = (row_identity(loaded(), each, "a", "", "csattn", SearchConfig()) for each in settings)
    assert some != every


def test_row_identity_without_a_context_depends_on_the_preset() -> None:
    """On a GPU, they become segments with the preset of a sketch, and with one of lists all are attended to."""
    settings = [Settings(build=BuildSettings(preset=x)) for x in ("default", "lists")]
    one, other = (row_identity(loaded(), each, None, "", "csattn", SearchConfig()) for each in settings)
    assert one != other
