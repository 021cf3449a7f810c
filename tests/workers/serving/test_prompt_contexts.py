"""Contexts built from long prompts: shared by equal beginnings, built once, within a budget, rebuilt when damaged."""

import asyncio
import errno
import itertools
import logging
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csattn.artifact import Artifact
from csattn.artifact.directories import lock_of
from csattn.errors import ArtifactError, ArtifactRoomError
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.prompting import DOCUMENT, FIRST, afresh, answer, answers, ask, computed, make_backend
from tests.workers.serving.requests import Clock
from workers.serving import examiner, kept_store, prefixes, prompt_contexts, residency
from workers.serving.backoff import FIRST_WAIT_S, LONGEST_WAIT_S, BuildBackoff
from workers.serving.build_queue import BuildCounts
from workers.serving.context_build import Builder
from workers.serving.contexts import name_artifact
from workers.serving.kept_rows import BLOCK_ROWS
from workers.serving.kept_store import DIRECTORY
from workers.serving.messages import Ask, ContextNotReadyError, ContextTooLongError, ServingError, Turn, WorkerLostError
from workers.serving.metrics import ContextCounts
from workers.serving.prompt_contexts import Found, PromptContexts
from workers.serving.residency import Residency
from workers.settings import BuildSettings

pytestmark = pytest.mark.usefixtures("builds")  # build in this process


def test_a_long_prompts_beginning_becomes_a_context_that_others_reuse(tmp_path, builds, caplog) -> None:
    caplog.set_level(logging.INFO, "workers")
    question = ask(DOCUMENT + "Which are red?"), ask(DOCUMENT + "How many hours does lamp 3 burn?")
    (_, first), (said, second) = answers(tmp_path / "kept", *question)
    assert len(builds) == 1 and first.context_tokens == second.context_tokens == 512
    begun, built = [record.getMessage() for record in caplog.records if record.name.endswith("prompt_contexts")]
    assert begun == "a context of 512 tokens is being built from a prompt"
    assert re.fullmatch(r"a context of 512 tokens was built in \d+\.\d s", built)
    assert first.cached_tokens == 0 and second.cached_tokens >= second.context_tokens
    assert computed(second) <= len("How many hours does lamp 3 burn?") + 30 + BLOCK_ROWS
    [(again, done)] = answers(tmp_path / "kept", question[1])
    assert again == said and done.cached_tokens >= second.cached_tokens and len(builds) == 1
    [(other, done)] = answers(tmp_path / "other", question[1])
    assert other == said and computed(done) == done.context_tokens + done.question_tokens and len(builds) == 2


@pytest.fixture
def fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets short contexts end in more places."""
    for module, name in ((prompt_contexts, "STEP"), (prompt_contexts, "LEFT_OUT"), (prefixes, "STEP")):
        monkeypatch.setattr(module, name, 64)


def test_instructions_become_a_context_whatever_follows_them(tmp_path, builds) -> None:
    """A question may be longer than what is otherwise left out for it."""

    def with_instructions(*texts: str) -> Ask:
        asked = ask(*texts, new=4)
        return replace(asked, turns=(Turn("system", DOCUMENT), *asked.turns))

    asked = with_instructions("Which are red?"), with_instructions("Hm. " * 40, "Well?", "How many?")
    (_, first), (said, second) = answers(tmp_path / "kept", *asked)
    assert len(builds) == 1 and first.context_tokens == second.context_tokens == 768
    assert first.cached_tokens == 0 and second.cached_tokens >= 768 and second.question_tokens > 200
    assert said == afresh(tmp_path, asked[1])


def test_a_prompt_that_shares_a_beginning_with_a_context_is_built_up_to_there(tmp_path, builds, fine_steps) -> None:
    """So those after it find what all begin with. Of that the first did not know, and took a part of its question."""
    asked = [ask(DOCUMENT[:600] + word * 125, new=4) for word in ("1 ", "2 ", "3 ")]
    (_, first), (_, second), (_, third) = answers(tmp_path / "kept", *asked)
    assert (first.context_tokens, second.context_tokens, third.context_tokens) == (768, 576, 576) and len(builds) == 2
    assert first.cached_tokens == second.cached_tokens == 0 and third.cached_tokens >= 576
    assert answers(tmp_path / "kept", asked[0])[0][1].context_tokens == 768, "the longest is found"
    salted = replace(asked[2], cache_salt="x")
    assert answers(tmp_path / "kept", salted)[0][1].context_tokens == 768, "contexts of other salts are not looked at"


def test_up_to_a_quarter_of_the_context_is_computed_in_steps(tmp_path, builds, fine_steps) -> None:
    asked = [ask(DOCUMENT + question, new=4) for question in ("?", "1" * 130, "2" * 200)]
    dones = [done for _, done in answers(tmp_path, *asked, context_tokens=0)]
    assert [done.context_tokens for done in dones] == [704, 704, 896]
    assert [done.cached_tokens for done in dones] == [0, 768, 0] and len(builds) == 2


def test_contexts_are_found_whichever_library_ran_their_kmeans(tmp_path, builds) -> None:
    question, lists = ask(DOCUMENT + "Which are red?"), BuildSettings(preset="lists", kmeans="torch")
    (_, first), (_, second) = answers(tmp_path, question, question, build=lists)
    assert len(builds) == 1 and first.cached_tokens == 0 and second.cached_tokens >= second.context_tokens == 512


def test_concurrent_requests_with_one_document_share_one_build(tmp_path, builds) -> None:
    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            said = await asyncio.gather(*(answer(backend, ask(DOCUMENT + "Which are red?")) for _ in range(4)))
            assert len({text for text, _ in said}) == 1 and len(builds) == 1

    asyncio.run(main())


def test_no_context_is_built_for_requests_cancelled_before_its_build(tmp_path, builds, monkeypatch) -> None:
    """The context of a request that has stayed or is repeated is still built."""
    begun, may_end, real = asyncio.Event(), asyncio.Event(), Builder.build

    async def wait(self: Builder, *args: Any, **kwargs: Any) -> dict[str, Any]:
        begun.set()
        await may_end.wait()
        return await real(self, *args, **kwargs)

    monkeypatch.setattr(Builder, "build", wait)

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            own, salts = backend._prefixes.prompt_contexts, ["left", "left", "left", "back", "stayed", "stayed"]
            coming = [asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt="first")))]
            await begun.wait()
            for salt in salts:
                coming.append(asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt=salt))))
            while own.builds.counts.num_waiting + own.builds.counts.num_building < len({"first", *salts}):
                await asyncio.sleep(0.01)
            for task in coming[:-1]:
                task.cancel()
            await asyncio.wait(coming[:-1])
            back = asyncio.create_task(answer(backend, ask(DOCUMENT + "Red?", salt="back")))
            may_end.set()
            said = {text for text, _ in await asyncio.gather(back, coming[-1])}
            assert len(said) == 1 and builds == [own._of(salt) for salt in ("first", "stayed", "back")]

    asyncio.run(main())


def test_no_build_starts_in_a_closing_service(tmp_path, builds, monkeypatch) -> None:
    """Earlier requests that still look for a context, and later ones, fail with WorkerLostError."""
    is_looking, may_go_on, real = threading.Event(), threading.Event(), PromptContexts._longest

    def look(*args: Any) -> Found:
        is_looking.set()
        may_go_on.wait(10.0)
        return real(*args)

    monkeypatch.setattr(PromptContexts, "_longest", look)

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


@pytest.mark.parametrize("name", ["layer-001.kv.safetensors", "tokens.safetensors"])
def test_a_damaged_context_is_rebuilt(tmp_path, builds, name) -> None:
    asked = ask(DOCUMENT + "Which are red?")
    [(want, _)] = answers(tmp_path, asked)
    [file] = builds[0].glob(f"*/{name}")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(data))
    [(said, again)] = answers(tmp_path, asked)
    assert said == want and len(builds) == 2
    assert again.cached_tokens < again.context_tokens


def test_concurrent_requests_verify_a_context_once(tmp_path, builds, monkeypatch) -> None:
    """Otherwise all threads would read the same bytes, and everyone who needs a file of the store would wait."""
    answers(tmp_path, ask(DOCUMENT + FIRST, new=1))
    looks, real = [], prompt_contexts.open_artifact

    def look(path: Path, **options: Any) -> Artifact:
        looks.append(path)
        time.sleep(0.2)
        return real(path, **options)

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            finds = [asyncio.create_task(answer(backend, ask(DOCUMENT + FIRST, new=1))) for _ in range(4)]
            while not looks:
                await asyncio.sleep(0.01)
            finds[0].cancel()
            await asyncio.wait(finds)
            assert finds[0].cancelled() and all(find.result()[1].context_tokens for find in finds[1:])

    monkeypatch.setattr(prompt_contexts, "open_artifact", look)
    asyncio.run(main())
    assert len(looks) == 1


def test_a_context_that_cannot_be_mapped_for_lack_of_files_is_not_removed(tmp_path, builds, monkeypatch) -> None:
    asked = ask(DOCUMENT + "Which are red?")
    [(want, _)] = answers(tmp_path, asked)
    [made] = (path for path in builds[0].iterdir() if path.is_dir())
    inode = made.stat().st_ino

    def refuse(path: Path, **how: Any) -> Artifact:
        raise ArtifactRoomError("too many open files")

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            with monkeypatch.context() as patch:
                patch.setattr(prompt_contexts, "open_artifact", refuse)
                assert not await backend._prefixes.prompt_contexts._is_intact(made)
            assert made.stat().st_ino == inode
            assert (await answer(backend, asked))[0] == want and len(builds) == 1

    asyncio.run(main())


def test_a_registered_text_as_system_message_uses_its_context(tmp_path, builds) -> None:
    """Files end with a newline, which builds strip."""
    text = text_of("heron")
    name_artifact(tmp_path / "kept", "heron", build(tmp_path / "kept", text), "float32")
    asked = [
        replace(ask("who?"), turns=(Turn("system", system), Turn("user", "who?")))
        for system in (text, f"{text}\n", f"\n {text}\r\n\n")
    ]
    for said, done in (got := answers(tmp_path / "kept", *asked)):
        assert done.context_tokens > 256 and done.cached_tokens >= done.context_tokens
        assert said == got[0][0]
    assert not builds


@pytest.mark.parametrize("damage", ["gone", "index"])
def test_a_prompt_is_answered_without_a_registered_context_that_is_damaged(tmp_path, builds, damage) -> None:
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
            await backend.drop(backend.status().held)
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
            assert info.state == "failed"
            assert ("there is no artifact" if damage == "gone" else "has 0 bytes instead of") in info.what
            with pytest.raises(ContextNotReadyError):
                await answer(backend, ask("Which are red?", context="lamps"))

    asyncio.run(main())


def test_a_failed_build_from_a_prompt_is_refused_with_the_reason(tmp_path, monkeypatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ArtifactError("the disk is full")

    monkeypatch.setattr(Builder, "build", fail)
    with pytest.raises(ContextNotReadyError, match="built from the prompt's beginning: the disk is full"):
        answers(tmp_path, ask(DOCUMENT))
    assert not list((tmp_path / DIRECTORY).rglob("*.json"))


def test_a_full_disk_is_reported_with_the_file_and_the_remedy(tmp_path, monkeypatch, caplog) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ContextNotReadyError, match=r"cannot write .*tokens-.*: No space left .* Free some space"):
        answers(tmp_path, ask(DOCUMENT))
    assert "Free some space" in caplog.text and "Traceback" not in caplog.text


def test_a_build_failures_reason_does_not_reveal_the_salts_path(tmp_path, monkeypatch, caplog) -> None:
    """Every tenant can see the reason in the status."""
    places: list[Path] = []

    async def fail(self: Builder, source: list[str], store: Path, *_: Any, **__: Any) -> None:
        places.append(store)
        raise ArtifactError(f"cannot write {store}/x: the disk is full")

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            with pytest.raises(ContextNotReadyError, match=r"cannot write kept/\.\.\./x: the disk is full") as refused:
                await answer(backend, replace(ask(DOCUMENT), cache_salt="red"))
            [failed] = backend.status().failed_builds
            assert places[0].name not in failed.why + refused.value.message and "the disk is full" in failed.why
            assert f"cannot write {places[0]}/x: " in refused.value.detail and refused.value.detail in caplog.text

    monkeypatch.setattr(Builder, "build", fail)
    asyncio.run(main())


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
def test_paths_of_unloadable_files_appear_only_in_the_log(tmp_path, builds, monkeypatch, fault) -> None:
    """Their path contains the salt's hash."""
    whole = Builder.build

    async def damaged(self: Builder, source: list[str], store: Path, *rest: Any, **options: Any) -> dict[str, Any]:
        result = await whole(self, source, store, *rest, **options)
        index = next((store / result["artifact"]).glob("*index*"))
        index.chmod(0o644)
        index.write_bytes(b"")
        return result

    def unreadable(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path / "x"))

    if fault == "damaged":
        monkeypatch.setattr(Builder, "build", damaged)
    else:
        monkeypatch.setattr(residency, "read_index", unreadable)
    with pytest.raises(ServingError, match=r"its files .* the service's log has the details") as refused:
        answers(tmp_path, ask(DOCUMENT))
    assert builds[0].name not in refused.value.message and str(tmp_path) not in refused.value.message
    assert str(builds[0]) in refused.value.detail


def test_a_failing_build_is_retried_with_exponential_backoff(tmp_path, builds, monkeypatch, caplog) -> None:
    """It does not hold up other prompts' builds, and the status has its reason."""
    tries, is_full, real, clock = [], True, Builder.build, Clock()

    async def build(self: Builder, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tries.append(clock.now)
        if is_full:
            raise ArtifactError("the disk is full")
        return await real(self, *args, **kwargs)

    async def main() -> None:
        nonlocal is_full
        async with make_backend(tmp_path) as backend:
            backend._prefixes.prompt_contexts.backoff = BuildBackoff(clock)
            for _ in range(100):
                with pytest.raises(ContextNotReadyError, match="not tried again for") as refused:
                    await answer(backend, ask(DOCUMENT + "Which are red?"))
                assert refused.value.retry_after_s is not None
                clock.now += 1.0
            waits = [after - before for before, after in itertools.pairwise(tries)]
            assert waits == [FIRST_WAIT_S * 2**n for n in range(len(waits))] and len(waits) == 4
            assert caplog.text.count("tried again") == len(tries)
            [failed] = backend.status().failed_builds
            assert (failed.num_tokens, failed.num_tries, failed.why) == (512, 5, "the disk is full")
            assert backend._prefixes.prompt_contexts.builds.counts.num_failed == 5
            is_full = False
            await answer(backend, ask("Another. " + DOCUMENT))
            clock.now += failed.retry_in_s
            await answer(backend, ask(DOCUMENT + "Which are red?"))
            assert backend.status().failed_builds == () and len(builds) == 2

    monkeypatch.setattr(Builder, "build", build)
    asyncio.run(main())


def test_build_backoff_bounds_its_waits_and_its_entries() -> None:
    clock = Clock()
    backoff = BuildBackoff(clock)
    waits = [backoff.add("a", 256, "no").retry_in_s for _ in range(2000)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S] and waits[-1] == LONGEST_WAIT_S
    assert backoff.of("b") is None
    clock.now += LONGEST_WAIT_S
    assert backoff.of("a") is None and backoff.report()[0].retry_in_s == 0.0
    for number in range(5000):
        backoff.add(number, 256, "no")
    assert len(backoff._known) <= 1000 and backoff.of(4999) is not None and backoff.of("a") is None
    assert [failed.num_tries for failed in backoff.report()] == [1] * 5


def test_a_prompt_that_fits_is_answered_though_its_context_build_failed(tmp_path, monkeypatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ArtifactError("the disk is full")

    asked = ask(FIRST * 4)
    want = afresh(tmp_path, asked, context_tokens=680)
    monkeypatch.setattr(Builder, "build", fail)
    [(said, done)] = answers(tmp_path / "kept", asked)
    assert said == want and done.context_tokens == 0 and done.question_tokens > 300


@pytest.mark.parametrize(("context_tokens", "num_builds"), [(500, 1), (600, 0)])
def test_a_prompt_that_fits_is_built_if_it_has_more_than_context_tokens(
    tmp_path, builds, context_tokens, num_builds
) -> None:
    [(_, done)] = answers(tmp_path, ask(FIRST * 4, new=1), context_tokens=context_tokens)
    assert len(builds) == num_builds and (done.context_tokens > 0) == (num_builds > 0)


def test_contexts_beyond_the_memory_budget_are_neither_found_nor_built(tmp_path, builds) -> None:
    """Another service with more memory has kept one. A prompt that fits is answered; others are refused at once."""
    asked = ask(DOCUMENT[:500] + "Which are red?"), ask(DOCUMENT + "Which are red?", new=300)
    answers(tmp_path, *asked)
    num_builds = len(builds)

    async def main() -> None:
        backend = make_backend(tmp_path)
        backend._residency._settings = replace(backend._residency._settings, context_bytes=100_000)
        async with backend:
            said, done = await answer(backend, asked[0])
            assert done.context_tokens == done.cached_tokens == 0
            assert said == await asyncio.to_thread(afresh, tmp_path, asked[0], context_tokens=1000)
            with pytest.raises(ContextTooLongError, match=r"engine\.context_bytes is 100,000"):
                await answer(backend, asked[1])

    asyncio.run(main())
    assert num_builds == len(builds)


def test_a_prompt_beyond_the_models_positions_is_refused_without_a_build(tmp_path, builds) -> None:
    with pytest.raises(ContextTooLongError, match="1024"):
        answers(tmp_path, ask(DOCUMENT + FIRST * 2))
    assert not builds


def test_kept_contexts_stay_within_their_budget(tmp_path, builds) -> None:
    documents = [ask(f"{n} {DOCUMENT}") for n in range(4)]

    async def main() -> tuple[int, ContextCounts]:
        async with make_backend(tmp_path, context_bytes=0) as backend:
            for document in documents:
                await answer(backend, document)
            own = backend._prefixes.prompt_contexts
            return sum(own._sizes().values()), backend.context_counts()

    num_bytes, counts = asyncio.run(main())
    assert (counts.kept_context_bytes, counts.kept_context_budget_bytes) == (num_bytes, 0)
    assert counts.builds["prompt"] == BuildCounts()
    left = [path for path in builds[0].iterdir() if path.is_dir()]
    assert len(builds) == 4 and len(left) == 1, "those in use, and the newest, stay"


def test_removed_salts_and_contexts_leave_no_directories_or_records(tmp_path, builds, monkeypatch) -> None:
    """On disk and in memory, also in another service on that store, which removed none of them itself."""
    monkeypatch.setattr(examiner, "_FEW", 1)

    async def main() -> None:
        async with make_backend(tmp_path, context_bytes=0) as one, make_backend(tmp_path) as two:
            for number in range(6):
                await answer(one, ask(DOCUMENT, salt=str(number)))
                await answer(two, ask(DOCUMENT, salt=str(number)))
            left = [path for path in (tmp_path / DIRECTORY).iterdir() if path.is_dir()]
            assert len(builds) == 6 and len(left) <= 2, "the newest, and one that it was made room with"
            for backend in (one, two):
                assert not backend._residency._wanted and len(backend._examiner._known) <= 3
            assert len(one._prefixes.prompt_contexts._checked) == 1
            await answer(two, ask("And now: " + DOCUMENT))
            loaded = two._residency.loaded_below(tmp_path)
            assert len(loaded) == 2 and all(path.exists() for path in loaded), "nothing that is gone is still mapped"

    asyncio.run(main())


def test_two_services_can_build_the_same_context_at_once(tmp_path, builds, monkeypatch) -> None:
    """Neither removes the token ids that the other builds from."""
    real, sources = Builder.build, list[str]()
    is_done = asyncio.Event()

    async def build(self: Builder, source: list[str], *args: Any, **options: Any) -> dict[str, Any]:
        sources.append(source[-1])
        if len(sources) == 2:
            await is_done.wait()
        return await real(self, source, *args, **options)

    monkeypatch.setattr(Builder, "build", build)

    async def main() -> None:
        async with make_backend(tmp_path) as one, make_backend(tmp_path) as two:
            first, second = (asyncio.create_task(answer(backend, ask(DOCUMENT))) for backend in (one, two))
            while len(sources) < 2:
                await asyncio.sleep(0.01)
            await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
            is_done.set()
            assert (await first)[0] == (await second)[0]

    asyncio.run(main())


def test_a_directory_removed_by_another_service_is_recreated(tmp_path, builds, monkeypatch) -> None:
    write, removed = Path.write_text, list[Path]()

    def remove_before(path: Path, text: str) -> int:
        if not removed:
            path.parent.rmdir()
            removed.append(path.parent)
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", remove_before)
    answers(tmp_path, ask(DOCUMENT))
    assert builds == removed


def test_leftovers_of_a_killed_service_are_removed(tmp_path, builds) -> None:
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


def test_an_abandoned_build_is_removed_with_its_lock_unless_it_runs(tmp_path, builds) -> None:
    """Within the budget it stays, to be continued."""
    answers(tmp_path, ask(DOCUMENT))
    [place] = builds
    abandoned, running = (place / f".building-{digit * 16}" for digit in "01")
    with lock_of(running).acquire():
        lock_of(abandoned)._path.touch()  # as a killed process leaves it
        for work in (abandoned, running):
            (work / "artifact").mkdir(parents=True)
            for path in (work, lock_of(work)._path):
                os.utime(path, (1e9, 1e9))
        answers(tmp_path, ask("1 " + DOCUMENT))
        assert abandoned.exists()
        answers(tmp_path, ask("2 " + DOCUMENT), context_bytes=0)
        names = {path.name for path in place.iterdir() if path.name.startswith((".", "gone-"))}
        assert names == {running.name, f"{running.name}.lock"}


def test_a_context_in_use_is_spared_and_another_is_removed(tmp_path, builds, monkeypatch) -> None:
    answers(tmp_path, ask(DOCUMENT))
    [used] = (path for path in builds[0].iterdir() if path.is_dir())
    num_bytes = sum(path.stat().st_size for path in used.iterdir())
    monkeypatch.setattr(Residency, "is_used", lambda self, path: path == used)
    answers(tmp_path, *(ask(f"{n} {DOCUMENT}") for n in range(2)), context_bytes=int(2.5 * num_bytes))
    left = [path for path in builds[0].iterdir() if path.is_dir()]
    assert len(builds) == 3 and len(left) == 2 and used in left


def test_the_context_budget_shrinks_to_the_free_disk_space(tmp_path, builds, monkeypatch, caplog) -> None:
    """The reduced budget is logged once, and is in the metrics."""
    caplog.set_level("INFO", "workers.serving.kept_store")
    answers(tmp_path, ask(DOCUMENT))
    monkeypatch.setattr(kept_store, "available_bytes", lambda path: 0)
    kept_bytes = kept_store.kept_files(tmp_path).context_bytes
    caplog.clear()

    async def main() -> None:
        async with make_backend(tmp_path) as backend:
            assert caplog.text.count("kept.context_bytes is ") == 1
            assert backend.context_counts().kept_context_budget_bytes == kept_bytes // 2
            await answer(backend, ask(f"1 {DOCUMENT}"))
            assert caplog.text.count("kept.context_bytes is ") == 1
            assert kept_bytes // 2 < backend.context_counts().kept_context_budget_bytes < 2 * kept_bytes

    asyncio.run(main())
    assert len(builds) == 2 and len([path for path in builds[0].iterdir() if path.is_dir()]) == 1
