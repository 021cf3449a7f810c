"""Contexts that do not fit into memory together stay within the budget, take turns, and are loaded only when needed."""

import asyncio
import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csattn.artifact import open_artifact, reader
from offload.codecs.formats import KvFormat
from offload.slot_cache import max_slots
from tests.tiny import loaded
from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.soundness import check
from tests.workers.serving.test_local import answer, ask, running, settings_of, until
from tests.workers.serving.test_preparation import path_of
from workers.capacity import context_bytes, room_for_contexts
from workers.serving import page_cache, residency, resident
from workers.serving.kept_store import remove_at_once
from workers.serving.local import LocalBackend
from workers.serving.messages import ContextTooLongError, Held
from workers.settings import EngineSettings


class Counting(FullEngine):
    """Counts how often each artifact is loaded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(loaded(), **options)
        self.loads: Counter[str] = Counter()

    def add_context(self, context_id, artifact, meanwhile):
        super().add_context(context_id, artifact)
        self.loads[artifact.path.name] += 1


def size_of(store: Path, name: str) -> int:
    with open_artifact(path_of(store, name)) as artifact:
        return sum(context_bytes(artifact.spec))


@asynccontextmanager
async def within(store: Path, engine: FullEngine, budget: int | None) -> AsyncIterator[LocalBackend]:
    """A service whose residency is checked at every load."""
    settings = replace(settings_of(store), engine=EngineSettings(context_bytes=budget))
    async with LocalBackend(engine, loaded(), settings) as backend:
        add = engine.add_context

        def checked(context_id: int, artifact: Any, meanwhile: Any) -> None:
            check(backend._residency)
            assert backend._residency.held_bytes >= sum(context_bytes(artifact.spec))
            add(context_id, artifact, meanwhile)

        engine.add_context = checked  # type: ignore[method-assign]
        yield backend
        check(backend._residency)


async def keep_asking(backend: LocalBackend, name: str, said: list[str], over: asyncio.Event) -> None:
    while not over.is_set():
        said.append((await answer(backend, ask(name, max_new_tokens=2)))[0])


@pytest.mark.parametrize("spare", [0, -1])
def test_loaded_contexts_stay_within_the_budget_to_the_byte(
    built: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """With one byte less than two contexts take, only one is held."""
    monkeypatch.setattr(resident, "TURN_S", 0.0)
    monkeypatch.setattr(resident, "TURN_LOADS", 0.0)
    sizes = sorted(size_of(built, name) for name in SECRETS)
    budget, rng = sizes[-1] + sizes[-2] + spare, np.random.default_rng(0)
    names = [SECRETS[i] for i in rng.integers(3, size=40)]

    async def main() -> None:
        async with running(built) as roomy:
            want = {name: await answer(roomy, ask(name)) for name in SECRETS}
        engine = Counting()
        async with within(built, engine, budget) as backend:
            told = await asyncio.gather(*(answer(backend, ask(name)) for name in names))
            assert told == [want[name] for name in names]
            assert len(engine.contexts) == (2 if spare == 0 else 1)
            status = backend.status()
            assert status.held_bytes <= budget == status.budget_bytes and not status.has_room
            [requests] = [metric for metric in await backend.metrics() if metric.name == "csattn_context_requests"]
            assert sum(sample.value for sample in requests.samples if sample.name.endswith("_total")) == len(names)

    asyncio.run(main())


def test_contexts_in_constant_use_take_turns_in_memory(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has room for one context, and no request waits forever."""
    monkeypatch.setattr(resident, "TURN_S", 0.15)
    monkeypatch.setattr(resident, "TURN_LOADS", 0.0)

    async def main() -> None:
        engine, over = Counting(), asyncio.Event()
        said: dict[str, list[str]] = {name: [] for name in SECRETS}
        async with within(built, engine, max(size_of(built, name) for name in SECRETS)) as backend:
            asking = [
                asyncio.create_task(keep_asking(backend, name, said[name], over)) for name in SECRETS for _ in range(3)
            ]
            await until(lambda: min(engine.loads[path_of(built, name).name] for name in SECRETS) >= 2)
            over.set()
            await asyncio.gather(*asking)
        assert all(len(set(answers)) == 1 for answers in said.values())

    asyncio.run(main())


@pytest.mark.parametrize("turn_s", [0.0, 1000.0])
def test_a_loaded_context_takes_new_requests_until_its_turn_ends(
    built: Path, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    """The context is in use, and another context waits for its memory."""
    monkeypatch.setattr(resident, "TURN_S", turn_s)
    monkeypatch.setattr(resident, "TURN_LOADS", 0.0)

    async def main() -> None:
        engine = Counting(tail_capacity=600)
        async with within(built, engine, max(size_of(built, name) for name in SECRETS)) as backend:
            events = backend.generate(ask("heron", max_new_tokens=400))
            await anext(events)
            waiting = asyncio.create_task(answer(backend, ask("walnut")))
            await asyncio.sleep(0.2)
            late = asyncio.create_task(answer(backend, ask("heron")))
            done, _ = await asyncio.wait(
                [late, waiting], timeout=0.5 if turn_s == 0.0 else None, return_when="FIRST_COMPLETED"
            )
            assert done == (set() if turn_s == 0.0 else {late})
            await events.aclose()
            await asyncio.gather(late, waiting)
            assert engine.loads[path_of(built, "heron").name] == (2 if turn_s == 0.0 else 1)

    asyncio.run(main())


def test_a_contexts_turn_is_as_long_as_its_load_took(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "TURN_S", 0.0)
    monkeypatch.setattr(resident, "TURN_LOADS", 1.0)

    class Slow(FullEngine):
        def add_context(self, context_id, artifact, meanwhile):
            time.sleep(0.1)
            super().add_context(context_id, artifact)

    async def main() -> None:
        async with running(built, Slow(loaded())) as backend:
            started = time.monotonic()
            await answer(backend, ask("heron"))
            [held] = backend._residency._residents.values()
            assert 0.2 <= held.stays_until - started <= 2 * (time.monotonic() - started)

    asyncio.run(main())


def test_a_context_counts_as_used_while_loading_and_answering(built: Path) -> None:
    path, seen = path_of(built, "heron"), list[bool]()

    class Looking(FullEngine):
        def add_context(self, context_id, artifact, meanwhile):
            seen.append(backend._residency.is_used(path))
            super().add_context(context_id, artifact)

    async def main() -> None:
        nonlocal backend
        async with running(built, Looking(loaded(), tail_capacity=600)) as backend:
            assert not backend._residency.is_used(path)
            events = backend.generate(ask("heron", max_new_tokens=400))
            await anext(events)
            assert seen == [True] and backend._residency.is_used(path)
            await events.aclose()
            await until(lambda: not backend._residency.is_used(path))

    backend: Any = None
    asyncio.run(main())


def test_contexts_leave_in_turn_order_and_no_more_than_needed() -> None:
    given = [resident.Resident(number, None, num_bytes=10, stays_until=float(3 - number)) for number in range(3)]
    assert resident.choose_leaving(given, 15, 0.5) == 1.0 and not any(one.is_leaving for one in given)
    assert resident.choose_leaving(given, 15, 1.5) == 2.0 and [one.is_leaving for one in given] == [False, False, True]
    assert resident.choose_leaving(given, 15, 9.0) is None and [one.is_leaving for one in given] == [False, True, True]
    assert resident.choose_leaving(given, 20, 9.0) is None and not given[0].is_leaving
    given[2].begin_turn(9.0, 1.0)
    assert not given[2].is_leaving and given[2].stays_until == 9.0 + resident.TURN_LOADS


def test_no_context_is_loaded_for_cancelled_requests(built: Path) -> None:
    async def main() -> None:
        engine = Counting(tail_capacity=600)
        async with within(built, engine, max(size_of(built, name) for name in SECRETS)) as backend:
            events = backend.generate(ask("heron", max_new_tokens=400))
            await anext(events)
            waiting = [asyncio.create_task(answer(backend, ask("walnut"))) for _ in range(2)]
            last = asyncio.create_task(answer(backend, ask("quartz")))
            await asyncio.sleep(0.1)
            for task in waiting:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await events.aclose()
            await last
            assert path_of(built, "walnut").name not in engine.loads
            assert (await answer(backend, ask("walnut")))[1].reason == "length"

    asyncio.run(main())


def test_a_context_deleted_while_loading_is_unloaded_after_its_requests(built: Path) -> None:
    path = path_of(built, "heron")

    async def main() -> None:
        async with running(built, FullEngine(loaded())) as backend:
            residency = backend._residency
            asked = asyncio.create_task(answer(backend, ask("heron")))
            await until(lambda: residency.is_used(path))
            assert not residency.loaded_below(built)
            await residency.forget(path)
            assert (await asked)[1].reason == "length"
            await until(lambda: not residency.loaded_below(built))
            assert not residency._forgotten
            await answer(backend, ask("heron"))
            assert residency.loaded_below(built) == [path], "asked for again, it stays"

    asyncio.run(main())


def test_a_context_deleted_while_loading_for_a_cancelled_request_is_unloaded(built: Path) -> None:
    path, begun, may_end = path_of(built, "heron"), threading.Event(), threading.Event()

    class Slow(FullEngine):
        def add_context(self, context_id, artifact, meanwhile):
            begun.set()
            assert may_end.wait(60)
            super().add_context(context_id, artifact)

    async def main() -> None:
        async with running(built, Slow(loaded())) as backend:
            asked = asyncio.create_task(answer(backend, ask("heron")))
            await until(begun.is_set)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            await backend._residency.forget(path)
            may_end.set()
            await until(lambda: not backend._residency.is_used(path) and not backend._residency.loaded_below(built))
            assert not backend._residency._forgotten

    asyncio.run(main())


def test_a_context_is_unloaded_even_if_the_request_that_found_it_truncated_is_cancelled(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would keep it, and load no other under its number."""
    monkeypatch.setattr(residency, "_CHECK_S", 0.0)
    store, may_step, engine = shutil.copytree(built, tmp_path / "store"), threading.Event(), FullEngine(loaded())
    step = engine.step

    def slow_step(*arguments: Any) -> Any:
        assert may_step.wait(60)
        return step(*arguments)

    async def main() -> None:
        async with within(store, engine, None) as backend:
            await answer(backend, ask("heron"))
            engine.step = slow_step  # type: ignore[method-assign]
            running = asyncio.create_task(answer(backend, ask("walnut")))
            await until(lambda: backend._scheduler.flow.num_in_flight == 1 and bool(engine.request_slots))
            rows = next(path_of(store, "heron").glob("*.kv.*"))
            os.truncate(rows, rows.stat().st_size // 2)
            refused = asyncio.create_task(answer(backend, ask("heron")))
            await until(lambda: not backend.status().has("heron"))
            refused.cancel()
            await asyncio.wait([refused])
            may_step.set()
            await running
            await until(lambda: len(engine.contexts) == 1)
            assert (await answer(backend, ask("quartz")))[1].reason == "length"

    asyncio.run(main())


def test_a_context_removed_while_it_waits_for_room_is_answered_from(built: Path, tmp_path: Path) -> None:
    """As by another service that shares the store: what is open stays readable."""
    store = shutil.copytree(built, tmp_path / "store")

    async def main() -> None:
        async with within(store, FullEngine(loaded()), max(size_of(store, name) for name in SECRETS)) as backend:
            events = backend.generate(ask("heron", max_new_tokens=100))
            await anext(events)
            asked = asyncio.create_task(answer(backend, ask("walnut")))
            await until(backend._residency._one_at_a_time.locked)
            remove_at_once(path_of(store, "walnut"))
            await events.aclose()
            assert (await asked)[1].reason == "length"

    asyncio.run(main())


def test_a_context_larger_than_the_budget_is_refused_with_the_reason(built: Path) -> None:
    async def main() -> None:
        async with within(built, Counting(), 5000) as backend:
            with pytest.raises(ContextTooLongError, match=r"engine.context_bytes is 5,000"):
                await answer(backend, ask("heron"))

    asyncio.run(main())


def test_a_context_replaces_others_when_the_file_limit_is_reached(built: Path, monkeypatch) -> None:
    """A limit on open files or mappings is not damage: no request is refused, and no context is reported as failed."""
    engine, real = Counting(), reader.map_file

    def one_beside(path: Path, layout: Any) -> Any:
        if len(engine.contexts) > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, layout)

    monkeypatch.setattr(reader, "map_file", one_beside)

    async def main() -> None:
        async with within(built, engine, None) as backend:
            for name in (*SECRETS, *SECRETS):
                assert (await answer(backend, ask(name)))[1].reason == "length"
                assert 1 <= len(engine.contexts) <= 2
            assert {info.state for info in await backend.contexts() if info.name in SECRETS} == {"ready"}

    asyncio.run(main())


def test_preloaded_contexts_never_evict_another(built: Path) -> None:
    async def main() -> None:
        engine = Counting()
        async with within(built, engine, 2 * max(size_of(built, name) for name in SECRETS)) as backend:
            held = [
                Held(path_of(built, name).name, (name,), size_of(built, name), 0)
                for name in ("heron", "walnut", "quartz")
            ]
            await backend.hold([Held("none", ("none",), 1, 0), *held])
            assert len(engine.contexts) == 2
            status = backend.status()
            assert status.has("heron") and status.has("walnut") and not status.has("quartz")
            await backend.drop(held[:1])
            assert not backend.status().has("heron") and len(engine.contexts) == 1
            assert (await answer(backend, ask("walnut")))[1].reason == "length"
            assert sum(engine.loads.values()) == 2

    asyncio.run(main())


def test_a_preloaded_context_evicts_none_for_room_that_requests_took_before_it(built: Path) -> None:
    may_end = threading.Event()

    class Slow(Counting):
        def add_context(self, context_id, artifact, meanwhile):
            assert may_end.wait(60)
            super().add_context(context_id, artifact, meanwhile)

    async def main() -> None:
        engine = Slow()
        async with within(built, engine, 2 * max(size_of(built, name) for name in SECRETS)) as backend:
            turns = backend._residency._one_at_a_time
            asked = [asyncio.create_task(answer(backend, ask("heron")))]
            await until(turns.locked)
            asked.append(asyncio.create_task(answer(backend, ask("walnut"))))
            await until(lambda: bool(turns._waiters))  # it has reserved no bytes yet
            held = Held(path_of(built, "quartz").name, ("quartz",), size_of(built, "quartz"), 0)
            holding = asyncio.create_task(backend.hold([held]))
            await until(lambda: path_of(built, "quartz") in backend._residency._loading)
            may_end.set()
            await asyncio.gather(*asked, holding)
            assert backend.status().has("heron") and backend.status().has("walnut")
            assert (await answer(backend, ask("quartz")))[1].reason == "length"

    asyncio.run(main())


def test_files_are_read_ahead_until_no_longer_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing directory is no error here: whoever needs its files reports it."""
    for name in ("layer-000.kv.safetensors", "layer-000.index.safetensors", "tokens.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / "._layer-000").mkdir()  # not a file of an artifact
    monkeypatch.setattr(page_cache, "_reports_residency", lambda path: False)
    read = count_reads(tmp_path, monkeypatch)
    page_cache.read_index(tmp_path)
    assert read == {"layer-000.index.safetensors": 1000, "tokens.safetensors": 1000}
    page_cache.read_rows(tmp_path, lambda: True)
    assert len(read) == 2
    never: Callable[[], bool] = lambda: False  # noqa: E731
    page_cache.read_rows(tmp_path, never)
    assert read["layer-000.kv.safetensors"] == 1000
    page_cache.drop_pages(tmp_path)
    for work in (
        lambda: page_cache.read_rows(tmp_path / "none", never),
        lambda: page_cache.read_index(tmp_path / "none"),
    ):
        work()
    page_cache.drop_pages(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing drops pages here")
def test_pages_in_memory_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = page_cache._PIECE_BYTES
    path, never = tmp_path / "layer-000.kv.safetensors", lambda: False
    path.write_bytes(bytes(2 * piece + 100))
    (tmp_path / "layer-001.kv.safetensors").touch()
    read = count_reads(tmp_path, monkeypatch)
    page_cache.read_rows(tmp_path, never)
    assert not read
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # dirty pages are not dropped
        os.posix_fadvise(file.fileno(), piece, piece, os.POSIX_FADV_DONTNEED)
    if page_cache._missing(path, 2 * piece + 100) != [piece]:
        pytest.skip("this file system does not drop pages")
    page_cache.read_rows(tmp_path, never)
    assert read == {path.name: piece}
    page_cache.read_rows(tmp_path, never)
    assert read == {path.name: piece}, "now it is"


def count_reads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the bytes that are read from now on, by name of the directory's file."""
    read, real = Counter[str](), os.pread

    def count(file: int, num_bytes: int, start: int) -> bytes:
        data = real(file, num_bytes, start)
        names = {path.stat().st_ino: path.name for path in directory.iterdir()}
        read[names[os.fstat(file).st_ino]] += len(data)
        return data

    monkeypatch.setattr(page_cache.os, "pread", count)
    return read


def test_the_number_of_contexts_with_room_follows_the_placement(built: Path) -> None:
    with open_artifact(path_of(built, "heron")) as artifact:
        spec = artifact.spec
    kv, others = context_bytes(spec)
    assert abs(kv + others - artifact.size_bytes) < 2 * 4096 * len(artifact.manifest.files)
    rows = len(spec.model.indexed_layers) * spec.model.num_kv_heads * spec.context_len
    q8_0 = KvFormat.parse("q8_0")
    in_q8_0, _ = context_bytes(replace_head_dim(spec), q8_0)
    assert in_q8_0 - rows * q8_0.row_bytes(32) in range(len(spec.model.indexed_layers) * 4096)
    on_cpu = EngineSettings()
    assert room_for_contexts(spec, on_cpu, 3 * (kv + others), 0) == 3
    assert room_for_contexts(spec, on_cpu, 3 * (kv + others) - 1, 0) == 2
    assert room_for_contexts(spec, replace(on_cpu, context_bytes=kv + others), 3 * (kv + others), 0) == 1
    assert room_for_contexts(spec, on_cpu, -5, 0) == 0
    device = EngineSettings(placement="device", num_contexts=9)
    assert room_for_contexts(spec, device, 0, 5 * (kv + others)) == 5
    hybrid = EngineSettings(placement="hybrid", num_contexts=9)
    assert (
        room_for_contexts(spec, hybrid, 7 * kv, 1 << 40) == 7 and room_for_contexts(spec, hybrid, 1 << 40, others) == 0
    )
    assert room_for_contexts(spec, hybrid, 1 << 40, 1 << 40) == 9
    longer = replace(spec, context_len=1 + 4 * max_slots())  # too long for a cache of half its rows
    kv, others = context_bytes(longer)
    assert room_for_contexts(longer, replace(hybrid, slot_share=0.5), 1 << 50, others + kv // 4) == 1


def replace_head_dim(spec: Any) -> Any:
    """Return the spec with a head_dim that the codec can encode."""
    return replace(spec, model=replace(spec.model, head_dim=32))
