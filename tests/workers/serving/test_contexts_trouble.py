"""Contexts of a store that lacks files, is damaged, or can no longer be written."""

import asyncio
import errno
import hashlib
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csattn.errors import ArtifactError, StoreFullError
from tests.tiny import loaded
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.registry import AnyText, registry, settings_of
from tests.workers.serving.test_contexts import ended
from workers.serving import context_file, local
from workers.serving import contexts as contexts_module
from workers.serving.context_build import Builder, BuildFailedError
from workers.serving.context_file import ContextFile, Record
from workers.serving.contexts import TEXTS, name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import (
    ContextExistsError,
    ContextNotReadyError,
    OverloadedError,
    ServingError,
    StorageUnavailableError,
)


def test_a_registered_context_whose_artifact_was_removed_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    artifact_id = build(store, text_of("gone"))
    builds: list[str] = []

    async def built_again(self: Builder, source: list[str], *args: Any) -> dict[str, Any]:
        builds.append(Path(source[-1]).read_text())
        return {"artifact": artifact_id, "context_len": 300, "reused": False}

    monkeypatch.setattr(Builder, "build", built_again)

    async def main() -> None:
        contexts, new = registry(tmp_path), ("a", text_of("gone"))
        await contexts.register(*new)
        assert (await ended(contexts, "a")).state == "ready"
        assert (await contexts.register(*new)).state == "ready" and len(builds) == 1
        shutil.rmtree(store / artifact_id)
        assert (await contexts.register(*new)).state == "building"
        assert (await ended(contexts, "a")).state == "ready" and builds == [text_of("gone")] * 2

    asyncio.run(main())


def test_a_name_whose_artifact_is_missing_cannot_be_registered_until_deleted(tmp_path: Path) -> None:
    store = settings_of(tmp_path).store.path
    name_artifact(store, "a", artifact_id := build(store, text_of("gone")), "float32")
    shutil.rmtree(store / artifact_id)

    async def main() -> None:
        contexts = registry(tmp_path)
        with pytest.raises(ContextExistsError, match="is missing or damaged, so its text is unknown; delete it first"):
            await contexts.register("a", text_of("gone"))

    asyncio.run(main())


def test_a_damaged_context_file_fails_every_request_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / context_file.FILE_NAME).write_bytes(b"{")
    contexts = registry(tmp_path)
    for asked in (contexts.start(), contexts.infos(), contexts.artifact_path("a"), contexts.delete("a")):
        with pytest.raises(ServingError, match="move it away and register the contexts again") as refused:
            asyncio.run(asked)
        assert str(tmp_path) not in refused.value.message and str(tmp_path) in refused.value.detail


def test_a_service_starts_once_the_damaged_context_file_is_removed(tmp_path: Path) -> None:
    settings, model = settings_of(tmp_path), loaded()
    file = settings.store.path / context_file.FILE_NAME
    file.parent.mkdir()
    file.write_bytes(b"{")

    def num_engine_threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("csattn-steps")

    async def main() -> None:
        before = num_engine_threads()
        backend = LocalBackend(FullEngine(model), model, settings)
        for _ in range(2):
            with pytest.raises(ServingError, match="move it away"):
                await backend.start()
        file.unlink()
        await backend.start()
        assert num_engine_threads() == before + 1
        assert await backend.contexts() == [] and (await backend.health()).ready
        await backend.close()

    asyncio.run(main())


def test_an_unwritable_store_is_logged_at_startup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lines() -> list[str]:
        async with LocalBackend(FullEngine(model := loaded()), model, settings_of(tmp_path)):
            return [line.getMessage() for line in caplog.records if line.name == local.__name__]

    assert asyncio.run(lines()) == []
    monkeypatch.setattr(local.os, "access", lambda *_: False)  # root may write what the mode forbids
    [line] = asyncio.run(lines())
    assert line.startswith(f"{tmp_path / 'store'} cannot be written: nothing can be registered")


def test_a_context_that_is_there_is_registered_again_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients register their contexts whenever they start, also with a service whose store is read-only."""
    artifact_id = build(store := tmp_path / "store", text_of("heron"))
    name_artifact(store, "heron", artifact_id, "float32")

    def is_read_only(self: Any, edit: Any) -> None:
        raise ArtifactError("cannot lock the store") from OSError(errno.EROFS, "Read-only file system")

    async def main() -> None:
        async with LocalBackend(FullEngine(loaded()), loaded(), settings_of(tmp_path)) as backend:
            again = await backend.register("heron", text_of("heron"))
            assert (again.state, again.artifact_id) == ("ready", artifact_id)
            with pytest.raises(StorageUnavailableError):
                await backend.register("stork", text_of("stork"))

    monkeypatch.setattr(context_file.ContextFile, "change", is_read_only)
    asyncio.run(main())


def test_a_failed_build_on_a_full_disk_is_reported_though_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk stops both the build and the context file; clients must still learn of the failure."""

    async def fill_the_disk(*args: Any) -> dict[str, Any]:
        monkeypatch.setattr(context_file, "write_bytes", no_room)
        raise BuildFailedError("no space is left")

    def no_room(path: Path, data: bytes) -> None:
        raise StoreFullError(f"cannot write {path}") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Builder, "build", fill_the_disk)

    async def main() -> None:
        contexts = registry(tmp_path)
        await contexts.register("a", "a text")
        assert (await ended(contexts, "a")).what == "no space is left"
        with pytest.raises(ContextNotReadyError, match="no space is left"):
            await contexts.artifact_path("a")
        assert "the context a could not be written: cannot write" in caplog.text and "Traceback" not in caplog.text
        for refused in (contexts.delete("a"), contexts.register("b", "a text")):
            with pytest.raises(StorageUnavailableError, match=r"cannot be .*ed: .*No space left") as told:
                await refused
            sent = pickle.loads(pickle.dumps(told.value))  # the error crosses processes
            assert str(tmp_path) not in sent.message and f"cannot write {tmp_path}" in sent.detail
            assert (sent.status, sent.retry_after_s) == (503, 30.0)
        for number in range(3):
            with pytest.raises(StorageUnavailableError):
                await contexts.register("b", f"text {number}")
        [left] = (tmp_path / "store" / TEXTS).iterdir()
        assert left.read_text() == "a text", "of what was refused nothing is kept"
        assert (await contexts.register("a", "a text")).state == "building"
        await contexts.builds.close()

    asyncio.run(main())


def test_a_lost_context_that_another_service_has_built_meanwhile_stays_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both services have found that its artifact is lost, and this one takes longer to tokenise the text."""
    digest, built = hashlib.sha256(b"a text").hexdigest(), "a" * 16
    lost = Record(name="a", created_at=1.0, text_sha256=digest, artifact_id="b" * 16, num_tokens=5)

    def build_elsewhere(self: Any, text: str) -> None:
        (tmp_path / "store" / built).mkdir()
        ContextFile(tmp_path / "store").change(lambda records: records.update(a=replace(lost, artifact_id=built)))

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(AnyText, "require", build_elsewhere)
    monkeypatch.setattr(Builder, "build", never)

    async def main() -> None:
        contexts = registry(tmp_path)
        ContextFile(tmp_path / "store").change(lambda records: records.update(a=lost))
        info = await contexts.register("a", "a text")
        assert (info.state, info.artifact_id) == ("ready", built)

    asyncio.run(main())


def test_many_registrations_at_once_leave_threads_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are few threads, and tokenizing a long text occupies one for seconds."""
    may_go_on, coming = threading.Event(), list[int]()

    def require(self: Any, text: str) -> None:
        coming.append(1)
        assert may_go_on.wait(20.0)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(AnyText, "require", require)
    monkeypatch.setattr(Builder, "build", never)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        contexts = registry(tmp_path)
        entering = [asyncio.create_task(contexts.register(f"c{number}", "a text")) for number in range(4)]
        while len(coming) < 2:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(10.0):
                assert await contexts.infos() == []
        finally:
            may_go_on.set()
        assert {info.state for info in await asyncio.gather(*entering)} == {"building"}
        monkeypatch.setattr(contexts_module, "MAX_WAITING", 1)
        many = [contexts.register(f"d{number}", "a text") for number in range(5)]
        refused = [isinstance(of, OverloadedError) for of in await asyncio.gather(*many, return_exceptions=True)]
        assert refused == [False] * 3 + [True] * 2, "what waits is held in memory"
        await contexts.builds.close()

    asyncio.run(main())


def test_another_process_cannot_drop_a_text_before_its_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, which could not register the same text, tries to drop it."""
    others, write = registry(tmp_path), contexts_module.write_bytes
    dropping: list[threading.Thread] = []

    def write_then_wait(path: Path, data: bytes) -> None:
        write(path, data)
        refused = Record(name="other", created_at=0.0, text_sha256=hashlib.sha256(data).hexdigest())
        dropping.append(threading.Thread(target=others._drop_text, args=(refused,)))
        dropping[0].start()
        dropping[0].join(0.3)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(contexts_module, "write_bytes", write_then_wait)
    monkeypatch.setattr(Builder, "build", never)

    async def main() -> None:
        contexts = registry(tmp_path)
        await contexts.register("a", "a text")
        dropping[0].join()
        [left] = (tmp_path / "store" / TEXTS).iterdir()
        assert left.read_text() == "a text"
        await contexts.builds.close()

    asyncio.run(main())


def test_texts_that_a_killed_service_left_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Builder, "build", never)

    async def main() -> None:
        contexts, texts = registry(tmp_path), tmp_path / "store" / TEXTS
        await contexts.register("a", "a text")
        await contexts.builds.close()
        [needed], foreign, unneeded = texts.iterdir(), texts / "notes.txt", texts / f"{'0' * 32}.txt"
        for path in (foreign, unneeded, texts / f".{needed.name}.01234567.partial"):
            path.write_text("left")
        again = registry(tmp_path)
        await again.start()
        assert set(texts.iterdir()) == {needed, foreign}
        await again.builds.close()

    asyncio.run(main())
