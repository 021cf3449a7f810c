"""The process that waits for the next build: real ones, of a real command line."""

import asyncio
from asyncio.subprocess import Process
from typing import Any

import psutil
import pytest

from tests.tiny import save
from workers.serving.context_build import Builder
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


def test_a_build_takes_the_process_that_waits_and_another_comes_that_ends_with_the_service(settings: Settings) -> None:
    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=0.0)
        first = await waiting(builder)
        built = await build(builder, settings)
        assert first.returncode == 0, "it was that one"
        assert (settings.store.path / built["artifact"]).is_dir()
        builder.start(settle_s=0.0)
        second = await waiting(builder)
        assert second.pid != first.pid and second.returncode is None
        assert second.stdin is not None
        second.stdin.close()  # as when the service is killed
        async with asyncio.timeout(WAIT_S):
            assert await second.wait() == 0
        builder.start(settle_s=0.0)
        third = await waiting(builder)
        await builder.close()
        assert third.returncode is not None and not psutil.pid_exists(third.pid)

    asyncio.run(main())


def test_one_that_was_killed_or_is_not_up_yet_is_not_waited_for(settings: Settings) -> None:
    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=0.0)
        process = await waiting(builder)
        process.kill()
        await process.wait()
        assert "artifact" in await build(builder, settings)
        assert "artifact" in await build(builder, settings), "the next is not up for a while"
        await builder.close()

    asyncio.run(main())
