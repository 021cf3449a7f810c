"""Named contexts: built in the background by real processes, resumed after a kill, reported when they fail."""

import asyncio
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csattn.artifact import Artifact
from csattn.artifact.directories import BUILDING_PREFIX, LOCK_SUFFIX
from csattn.artifact.lock import BuildLock
from csattn.config import preset
from csattn.errors import ArtifactCorruptError, ArtifactError, ArtifactNotFoundError, ConfigError, ContextError
from csattn.models import load_model
from index_build.plan import make_plan
from tests.tiny import save
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.registry import registry, settings_of
from tests.workers.serving.test_local import answer, ask
from workers.serving import context_build
from workers.serving.build_queue import BuildCounts
from workers.serving.context_build import Builder, BuildFailedError
from workers.serving.context_file import FILE_NAME, ContextFile, Record
from workers.serving.context_texts import ContextTexts
from workers.serving.contexts import TEXTS, Contexts, name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import (
    BadRequestError,
    ContextExistsError,
    ContextInfo,
    ContextNotReadyError,
    UnknownContextError,
    UnknownModelError,
)
from workers.settings import Settings, StoreSettings

TIMEOUT_S = 120.0


async def ended(contexts: Contexts | LocalBackend, name: str) -> ContextInfo:
    """Wait until the context's build has ended, and return the context's info."""
    infos: Callable[[], Any] = contexts.infos if isinstance(contexts, Contexts) else contexts.contexts
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            info = next(info for info in await infos() if info.name == name)
            if info.state != "building":
                return info  # type: ignore[no-any-return]
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("contexts")
    save(place / "model")
    return place


@pytest.fixture(autouse=True)
def builds_at_normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run builds at normal priority: at a lower one, they may wait for other tests for minutes."""
    monkeypatch.setattr(context_build, "_set_nice", lambda process, nice: True)


def test_a_registered_text_is_built_and_survives_a_service_restart(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "workers")
    loaded, settings, text = load_model(str(place / "model")), settings_of(place), text_of("otter") + "\nDo not.\n"

    async def first() -> tuple[str, list[ContextInfo]]:
        async with LocalBackend(FullEngine(loaded), loaded, settings) as backend:
            info = await backend.register("otter", text)
            assert (info.state, info.progress) == ("building", 0.0)
            with pytest.raises(ContextNotReadyError, match="being built"):
                await answer(backend, ask("otter"))
            for same_text in (text, "\ufeff" + text, text.replace("\n", "\r\n")):
                assert (await backend.register("otter", same_text)).created_at == info.created_at
            with pytest.raises(ContextExistsError, match="another text"):
                await backend.register("otter", text + "!")
            told = {next(iter(await backend.contexts())).progress}
            while (now := (await backend.contexts())[0]).state == "building":
                told.add(now.progress)
                await asyncio.sleep(0.005)
            assert now.state == "ready" and now.progress == 1.0 and now.num_tokens
            assert sorted(told)[0] == 0.0 and len(told) > 1, "progress was told"
            for same_text in (text, "\ufeff" + text, text.replace("\n", "\r\n"), f"\n{text}\n"):
                same = await backend.register("otter", same_text)
                assert same.artifact_id == now.artifact_id
            await backend.register("mink", text)
            while "building" in {info.state for info in await backend.contexts()}:
                await asyncio.sleep(0.01)
            return (await answer(backend, ask("otter")))[0], await backend.contexts()

    async def again() -> tuple[str, list[ContextInfo]]:
        async with LocalBackend(FullEngine(loaded), loaded, settings) as backend:
            return (await answer(backend, ask("otter")))[0], await backend.contexts()

    before = asyncio.run(first())
    told = [record.getMessage() for record in caplog.records if record.name.endswith("contexts")]
    begun, done, _, found = told
    num_tokens = before[1][0].num_tokens
    assert begun == "the context otter is being built"
    assert re.fullmatch(rf"the context otter, of {num_tokens:,} tokens, was built in \d+\.\d s", done)
    assert re.fullmatch(
        rf"the context mink, of {num_tokens:,} tokens, was in the store already, found in \d+\.\d s", found
    )
    assert asyncio.run(again()) == before
    assert not list((place / "store" / TEXTS).iterdir()), "the text is not kept longer than its building"


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.workers.serving.registry import registry

async def main():
    contexts = registry(Path(sys.argv[1]))
    await contexts.start()
    await contexts.register("killed", sys.argv[2])
    print("registered", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_build_is_resumed_after_its_service_was_killed(place: Path) -> None:
    text = text_of("killed")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place), text], stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"registered\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert ContextFile(place / "store").read()["killed"].state == "building"

    async def back() -> ContextInfo:
        contexts = registry(place)
        await contexts.start()
        assert (await contexts.register("killed", text)).state == "building"
        return await ended(contexts, "killed")

    assert asyncio.run(back()).state == "ready"


def test_builds_are_queued_report_failures_and_end_when_deleted(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        contexts = registry(place)
        await contexts.register("short", "too short")
        await contexts.register("waits", text_of("waits"))
        assert next(i for i in await contexts.infos() if i.name == "waits").what == "waiting for another build"
        assert contexts.builds.counts == BuildCounts(num_waiting=1, num_building=1)
        deleted = await contexts.delete("waits")
        assert deleted is None and "waits" not in {info.name for info in await contexts.infos()}
        failed = await ended(contexts, "short")
        async with asyncio.timeout(TIMEOUT_S):
            while contexts.builds.counts.num_building:  # the record is written before the build's place is free
                await asyncio.sleep(0.01)
        assert contexts.builds.counts == BuildCounts(num_failed=1)
        assert failed.state == "failed" and "an index needs at least" in failed.what
        assert f"the context short could not be built: {failed.what}" in caplog.text
        with pytest.raises(ContextNotReadyError, match="could not be built: the context has"):
            await contexts.artifact_path("short")
        with pytest.raises(ContextExistsError):
            await contexts.register("short", "other text")
        await contexts.delete("short")
        with pytest.raises(UnknownContextError):
            await contexts.delete("short")
        with pytest.raises(UnknownModelError):
            await contexts.artifact_path("short")
        await contexts.builds.close()
        assert not list((place / "store" / TEXTS).glob("*.txt"))

    asyncio.run(main())


def test_a_failed_build_is_reported_and_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    async def die(self: Builder, source: list[str], *args: Any) -> dict[str, Any]:
        tries.append(1)
        assert Path(source[-1]).read_text() == "a text"
        if len(tries) == 1:
            raise BuildFailedError("the build was killed by signal 9")
        return {"artifact": "0" * 16, "context_len": 300, "reused": False}

    monkeypatch.setattr(Builder, "build", die)

    async def main() -> None:
        contexts = registry(tmp_path)
        await contexts.register("a", "a text")
        assert (await ended(contexts, "a")).what == "the build was killed by signal 9"
        assert (await contexts.register("a", "a text")).state == "building"
        assert (await ended(contexts, "a")).state == "ready"

    asyncio.run(main())


def test_a_name_reregistered_by_another_service_is_built_from_its_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service of the store deleted and reregistered the name while this one was building it."""
    begun: list[str] = []

    async def build(self: Builder, source: list[str], store: Path, tell: Any) -> dict[str, Any]:
        begun.append(Path(source[-1]).read_text())
        tell(0.5, "layer 1 of 2", "0" * 16)
        await asyncio.sleep(1000 if begun[-1] == "old text" else 0)
        return {"artifact": "0" * 16, "context_len": 300, "reused": False}

    monkeypatch.setattr(Builder, "build", build)

    async def main() -> None:
        here, elsewhere = registry(tmp_path), registry(tmp_path)
        await here.register("a", "old text")
        async with asyncio.timeout(TIMEOUT_S):
            while not begun:
                await asyncio.sleep(0.01)
        await elsewhere.delete("a")
        elsewhere._enter("a", "new text", b"new text", hashlib.sha256(b"new text").hexdigest())
        assert [info.progress for info in await here.infos()] == [0.0], "the old text's is not its own"
        await asyncio.gather(*(here.register("a", "new text") for _ in range(3)))
        assert (await ended(here, "a")).state == "ready" and begun == ["old text", "new text"]

    asyncio.run(main())


def test_a_context_that_another_service_has_built_is_no_failed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text is gone once it is built."""
    caplog.set_level(logging.INFO)
    begun: list[Builder] = []

    async def build(self: Builder, source: list[str], *args: Any) -> dict[str, Any]:
        begun.append(self)
        while Path(source[-1]).exists() and self is begun[-1]:
            await asyncio.sleep(0.01)
        if self is begun[-1]:
            raise BuildFailedError("cannot read the text")
        return {"artifact": "0" * 16, "context_len": 300, "reused": False}

    monkeypatch.setattr(Builder, "build", build)

    async def main() -> None:
        here, elsewhere = registry(tmp_path), registry(tmp_path)
        async with asyncio.timeout(TIMEOUT_S):
            await elsewhere.register("a", "a text")
            while not begun:
                await asyncio.sleep(0.01)
            await here.register("a", "a text")
            while here.builds.counts.num_waiting or here.builds.counts.num_building:
                await asyncio.sleep(0.01)
        assert here.builds.counts == BuildCounts() and "could not be built" not in caplog.text
        assert (await ended(here, "a")).state == "ready"

    asyncio.run(main())


def test_deleting_a_context_removes_its_unfinished_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another name has the same text, or another process builds it. One that has failed is removed, too."""
    work = tmp_path / "store" / f"{BUILDING_PREFIX}{'0' * 16}"

    async def build(self: Builder, source: list[str], store: Path, tell: Any) -> dict[str, Any]:
        work.mkdir(exist_ok=True)
        tell(0.5, "layer 1 of 2", "0" * 16)
        if Path(source[-1]).read_text() == "it fails":
            raise BuildFailedError("the disk is full")
        await asyncio.sleep(1000)
        return {}

    monkeypatch.setattr(Builder, "build", build)

    async def main() -> None:
        contexts = registry(tmp_path)

        async def begin(name: str, text: str) -> None:
            await contexts.register(name, text)
            async with asyncio.timeout(TIMEOUT_S):
                while not work.exists():
                    await asyncio.sleep(0.01)

        await begin("a", "a text")
        await contexts.register("b", "a text")
        await contexts.delete("a")
        assert work.exists()
        await contexts.delete("b")
        assert not work.exists()
        await begin("a", "a text")
        with BuildLock(work.with_name(f"{work.name}{LOCK_SUFFIX}")).acquire():
            await contexts.delete("a")
        assert work.exists()
        work.rmdir()
        await begin("c", "it fails")
        assert (await ended(contexts, "c")).state == "failed" and work.exists()
        await contexts.delete("c")
        assert not work.exists()

    asyncio.run(main())


def test_closing_ends_builds_and_leaves_no_process(place: Path) -> None:
    async def main() -> None:
        contexts = registry(place)
        await contexts.register("closed", text_of("closed"))
        await asyncio.sleep(0.5)
        await contexts.builds.close()

    def mine() -> str:
        return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

    asyncio.run(main())
    assert str(place / "store") not in mine()
    assert ContextFile(place / "store").read()["closed"].state == "building"
    ContextFile(place / "store").change(lambda records: records.pop("closed"))


def test_artifacts_are_named_and_renaming_conflicts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact_id = build(tmp_path, text_of("named"))
    name_artifact(tmp_path, "my.context-1", artifact_id[:6], "float32")
    named = ContextFile(tmp_path).read()
    assert [(record.name, record.state, record.artifact_id) for record in named.values()] == [
        ("my.context-1", "ready", artifact_id)
    ]
    with monkeypatch.context() as read_only:  # a service starts again, with the same --context
        read_only.setattr(ContextFile, "change", lambda *given: pytest.fail("writes to the store"))
        name_artifact(tmp_path, "my.context-1", artifact_id, "float32")
        name_artifact(tmp_path, "my.context-1", str(tmp_path / artifact_id), "float32")
    other = build(tmp_path, text_of("other"))
    with pytest.raises(ContextExistsError, match=other):
        name_artifact(tmp_path, "my.context-1", other, "float32")
    with pytest.raises(ArtifactNotFoundError, match="there is no artifact"):
        name_artifact(tmp_path, "b", "fff", "float32")
    with pytest.raises(ConfigError, match=r"in float32 .* loads its model in bfloat16; .*build\.dtype=float32"):
        name_artifact(tmp_path, "c", artifact_id, "bfloat16")


def test_registering_a_named_artifacts_own_text_finds_that_context(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, is_of = list[str](), ContextTexts.is_of

    def count(self: ContextTexts, artifact: Artifact, text: str) -> bool:
        compared.append(text)
        return is_of(self, artifact, text)

    async def main() -> None:
        model = load_tiny()
        backend = LocalBackend(FullEngine(model), model, Settings(store=StoreSettings(path=built)))
        info = await backend.register("heron", text_of("heron"))
        assert info.state == "ready"
        from_elsewhere = "\ufeff" + text_of("heron").replace("\n", "\r\n")
        assert (await backend.register("heron", from_elsewhere)).state == "ready"
        with pytest.raises(ContextExistsError):
            await backend.register("heron", text_of("other"))
        await backend.close()

    monkeypatch.setattr(ContextTexts, "is_of", count)
    asyncio.run(main())
    assert len(compared) == 3, "each text is tokenised once"


def load_tiny() -> Any:
    from tests.tiny import loaded

    return loaded()


@pytest.mark.parametrize(
    "name", ["", "a b", "../a", ".a", "a/b", "é", "a" * 65, "a\n", "-", "..", "a@b", "a%2f", "\x00"]
)
def test_invalid_context_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequestError, match="context's name") as refused:
        asyncio.run(registry(tmp_path).register(name, "x"))
    assert refused.value.param == "name" and "letters from a to z and A to Z" in refused.value.message
    assert not (tmp_path / "store").exists()


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="empty"):
        asyncio.run(registry(tmp_path).register("a", " \n"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Once.", "an index needs at least 256"),
        ("Lamps burn. " * 200, "1024 positions, of which the question needs at least one"),
        ("Lamps burn. " * 800, "the context has more than 1024 tokens"),  # not all of it is tokenised
        ("Lamps\0burn. " * 40, "not plain text; it has a NUL at byte 5; remove it"),
        ("{\\rtf1 Lamps burn. " * 40, "not plain text; it is RTF: save it as plain text"),
    ],
)
def test_a_text_that_cannot_become_a_context_is_refused_at_once(tmp_path: Path, text: str, why: str) -> None:
    async def main() -> None:
        model = load_tiny()
        async with LocalBackend(FullEngine(model), model, settings_of(tmp_path)) as backend:
            with pytest.raises(BadRequestError, match=why) as refused:
                await backend.register("a", text)
            assert refused.value.param == "text" and await backend.contexts() == []
        assert not (tmp_path / "store" / TEXTS).exists()

    asyncio.run(main())


def test_token_ids_beyond_the_embedding_are_refused_for_a_context() -> None:
    model = load_tiny()
    ids = np.full(300, model.geometry.vocab_size, np.int32)
    with pytest.raises(ContextError, match="the model's embedding has ids below"):
        make_plan(model, ids, preset("default"), {})


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"[" * 99_999, b'{"version": 9, "contexts": []}', b'{"version": 1}']
)
def test_a_damaged_context_file_is_refused_with_the_remedy(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    with pytest.raises(ArtifactCorruptError, match="move it away"):
        ContextFile(tmp_path).read()


@pytest.mark.parametrize(
    "damage",
    [
        {"name": "../a"}, {"name": "<b>"}, {"name": 5}, {"name": ["a"]}, {"artifact_id": "../other/" + "0" * 16},
        {"artifact_id": "/" + "0" * 16}, {"artifact_id": ""}, {"artifact_id": 5}, {"text_sha256": "../../home/letter"},
        {"text_sha256": 5}, {"num_tokens": "5"}, {"created_at": "now"}, {"created_at": float("inf")}, {"error": 5},
        {"created_at": 10**400}, {"num_tokens": -5}, {"error": "\ud800"},
        {"more": 1},
    ],
)  # fmt: skip
def test_an_invalid_context_record_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    """The store may be of foreign origin: no record may lead out of it, or cause an error later."""
    sound = {"name": "a", "created_at": 1.0, "text_sha256": "0" * 64, "artifact_id": "0" * 16, "num_tokens": 5}
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps({"version": 1, "contexts": [sound]}))
    assert list(ContextFile(tmp_path).read()) == ["a"]
    file.write_text(json.dumps({"version": 1, "contexts": [sound | damage]}))
    with pytest.raises(ArtifactCorruptError, match="move it away") as refused:
        ContextFile(tmp_path).read()
    assert len(str(refused.value)) < 500


def test_an_unreadable_context_file_is_reported_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / FILE_NAME).symlink_to("loop")
    with pytest.raises(ArtifactError, match=r"cannot read .*contexts\.json: Too many levels .*; check the store"):
        ContextFile(tmp_path).read()


def test_concurrent_changes_of_the_context_file_are_all_kept(tmp_path: Path) -> None:
    files = [ContextFile(tmp_path) for _ in range(4)]

    def add(number: int) -> None:
        name = f"c{number}"
        files[number % 4].change(lambda records: records.setdefault(name, Record(name=name, created_at=float(number))))

    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(add, number) for number in range(40)))

    asyncio.run(main())
    assert set(files[0].read()) == {f"c{number}" for number in range(40)}
