"""The process that waits for the next build: real ones, of a real command line."""

import asyncio
from asyncio.subprocess import Process
from typing import Any

import psutil
import pytest

from tests.index_build.batches import hashes
from tests.tiny import save
from workers.serving import context_build
from workers.serving.context_build import Builder, BuildFailedError
from workers.settings import BuildSettings, ModelSettings, Settings, StoreSettings

WAIT_S = 60.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("standby")
    (place / "text.txt").write_text("What is waited for comes at once. " * 12)
    return Settings(
        store=StoreSettings(path=place / "store"),
        model=ModelSettings(name=str(save(place / "model"))),
        build=BuildSettings(device="cpu"),
    )


async def waiting(builder: Builder) -> Process:
    assert builder._standby is not None
    return await builder._standby


def build(builder: Builder, settings: Settings) -> Any:
    store = settings.store.path
    return builder.build(["--context", str(store.parent / "text.txt")], store, lambda share, what: None, nice=0)


def test_a_build_takes_the_process_that_waits_and_another_comes_that_ends_with_the_service(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is behind does not build what somebody waits for, nor is one that is not up yet waited for."""

    def refuse(*what: int) -> None:
        raise PermissionError

    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=0.0)
        first = await waiting(builder)
        built = await build(builder, settings)
        assert builder._used is first and first.returncode is None, "it was that one"
        assert (settings.store.path / built["artifact"]).is_dir()
        with monkeypatch.context() as patch:
            patch.setattr("workers.serving.context_build.os.setpriority", refuse)
            await build(builder, settings)
        second = builder._used
        assert first.returncode is not None and second not in (None, first)
        builder.start(settle_s=0.0)
        third = await waiting(builder)
        assert third not in (first, second) and third.returncode is None
        assert third.stdin is not None
        third.stdin.close()  # as when the service is killed
        async with asyncio.timeout(WAIT_S):
            assert await third.wait() == 0
        builder.start(settle_s=0.0)
        last = await waiting(builder)
        await builder.close()
        for process in (first, second, last):
            assert process is not None and process.returncode is not None and not psutil.pid_exists(process.pid)

    asyncio.run(main())


def test_one_that_has_built_builds_again_with_the_model_that_it_has_until_it_is_let_go(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that was killed while it waited, another builds."""

    async def main() -> None:
        builder, seen = Builder(settings), list[tuple[float, str]]()
        builder.start(settle_s=0.0)
        process = await waiting(builder)
        store = settings.store.path
        for number in range(3):
            text = store.parent / f"{number}.txt"
            text.write_text(f"{number} is another text. " * 20)
            built = await builder.build(["--context", str(text)], store, lambda *told: seen.append(told), nice=0)
            assert not built["reused"] and builder._used is process
            assert seen[-1][0] == 1.0, "all that was told of it came before its end"
        (settings.store.path.parent / "empty.txt").write_text("")
        with pytest.raises(BuildFailedError, match="empty"):
            await builder.build(["--context", str(store.parent / "empty.txt")], store, lambda *told: None, nice=0)
        assert builder._used is None and process.returncode == 1, "one that has failed is not asked again"
        builder.start(settle_s=0.0)
        killed = await waiting(builder)
        killed.kill()
        await killed.wait()
        monkeypatch.setattr(context_build, "KEEP_S", 0.1)
        other = store.parent / "other"
        source = ["--context", str(store.parent / "2.txt")]
        fresh = await builder.build(source, other, lambda *told: None, nice=0)
        layers = [hashes(place / made["artifact"]) for place, made in ((other, fresh), (store, built))]
        assert len(layers[0]) > 2
        assert all(layers[0][name] == layers[1][name] for name in layers[0] if name != "manifest.json")
        last = builder._used
        assert last is not None
        async with asyncio.timeout(WAIT_S):
            assert await last.wait() == 0
        assert builder._used is None
        await builder.close()

    asyncio.run(main())


def test_a_build_that_is_ended_while_it_waits_for_its_process_begins_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    async def begin(*args: Any, **kwargs: Any) -> Process:
        begun.append(args)
        raise OSError

    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=1000.0)
        ended = asyncio.create_task(build(builder, settings))
        await asyncio.sleep(0)
        ended.cancel()
        await asyncio.wait([ended])
        assert ended.cancelled() and not begun
        await builder.close()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    asyncio.run(main())
