"""The standby process that waits for the next build: real processes of the real command line."""

import asyncio
import os
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import psutil
import pytest

from csattn.artifact.directories import BUILDING_PREFIX, LOCK_SUFFIX
from csattn.artifact.lock import BuildLock
from tests.index_build.batches import hashes
from tests.tiny import save
from workers.serving import context_build
from workers.serving.context_build import Builder, BuildFailedError
from workers.settings import BuildSettings, ModelSettings, Settings, StoreSettings

WAIT_S = 60.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("standby")
    return Settings(
        store=StoreSettings(path=place / "store"),
        model=ModelSettings(name=str(save(place / "model"))),
        build=BuildSettings(device="cpu"),
    )


async def waiting(builder: Builder) -> Process:
    assert builder._standby is not None
    return await builder._standby


def test_builds_use_and_replace_the_standby_process_which_ends_with_the_service(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process builds again with the model that it has loaded, unless it failed, was killed, or runs at a lower
    priority that cannot be raised. A build does not wait for a process that is still starting."""
    store = settings.store.path
    texts = [store.parent / f"{number}.txt" for number in range(3)]
    for number, text in enumerate(texts):
        text.write_text(f"{number} is another text. " * 20)
    (empty := store.parent / "empty.txt").write_text("")
    seen = list[tuple[float, str, str]]()

    def refuse(*what: int) -> None:
        raise PermissionError

    async def main() -> None:
        builder = Builder(settings)

        def build(text: Path, store: Path = store) -> Any:
            return builder.build(["--context", str(text)], store, lambda *told: seen.append(told), nice=0)

        builder.start(settle_s=0.0)
        first = await waiting(builder)
        for text in texts:
            built = await build(text)
            assert builder._used is first and first.returncode is None, "it was that one"
            assert (store / built["artifact"]).is_dir() and not built["reused"]
            assert seen[-1][::2] == (1.0, built["artifact"]), "all that was told of it came before its end"
        with pytest.raises(BuildFailedError, match="empty"):
            await build(empty)
        assert builder._used is None and first.returncode == 1, "one that has failed is not asked again"

        await builder.close()  # also the process that was to start later
        builder.start(settle_s=0.0)
        killed = await waiting(builder)
        killed.kill()
        await killed.wait()
        fresh, second = await build(texts[-1], store.parent / "other"), builder._used
        layers = [hashes(path / made["artifact"]) for path, made in ((store.parent / "other", fresh), (store, built))]
        assert len(layers[0]) > 2
        assert all(layers[0][name] == layers[1][name] for name in layers[0] if name != "manifest.json")

        assert second is not None and context_build._set_nice(second, 1)
        threads = {thread.id for thread in psutil.Process(second.pid).threads()}
        behind = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert behind == {os.getpriority(os.PRIO_PROCESS, 0) + 1}, "all of its threads stand behind"
        shares = Path("/proc/sys/kernel/sched_autogroup_enabled")
        if os.geteuid() == 0 and shares.exists() and shares.read_text().strip() == "1":  # others are rate-limited
            assert Path(f"/proc/{second.pid}/autogroup").read_text().split()[-1] == "1"

        with monkeypatch.context() as patch:
            patch.setattr(context_build.os, "setpriority", refuse)
            patch.setattr(context_build, "KEEP_S", 0.1)
            await build(texts[0])
        third = builder._used
        assert third is not None and third is not second and second.returncode is not None
        async with asyncio.timeout(WAIT_S):
            assert await third.wait() == 0, "it is let go, and ends when nothing more can come, as of a killed service"
        assert builder._used is None
        await builder.close()
        builder.start(settle_s=0.0)
        last = await waiting(builder)
        await builder.close()
        for process in (first, second, third, last):
            assert process.returncode is not None and not psutil.pid_exists(process.pid)

    asyncio.run(main())


def test_a_build_that_waits_for_another_says_so_and_ends_when_its_service_is_killed(settings: Settings) -> None:
    """Otherwise its process would wait for another build, or block the next service's, with a model in memory."""
    store, other = settings.store.path, settings.store.path.parent / "killed"
    (text := store.parent / "killed.txt").write_text("Yet another text. " * 20)
    other.mkdir()

    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=0.0)
        source = ["--context", str(text)]
        built = await builder.build(source, store, lambda *told: None, nice=0)
        with BuildLock(other / f"{BUILDING_PREFIX}{built['artifact']}{LOCK_SUFFIX}").acquire():
            process = builder._used
            seen = list[tuple[float, str, str]]()
            build = builder.build(source, other, lambda *told: seen.append(told), nice=0)
            building = asyncio.create_task(build)
            async with asyncio.timeout(WAIT_S):
                while not seen:
                    await asyncio.sleep(0.01)
            assert seen == [(0.0, context_build.WAITS, "")]
            assert process is not None and process.stdin is not None
            process.stdin.close()  # as when the service ends
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0
            with pytest.raises(BuildFailedError):
                await building
        await builder.close()

    asyncio.run(main())


def test_processes_that_are_not_kept_for_another_build_are_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Process] = []

    async def begin(self: Builder, settle_s: float = 0.0) -> Process:
        script = f"""read line; echo '{{"artifact": "a"}}'; echo {context_build.BUILT} | tee /dev/stderr; exec cat"""
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        begun.append(await asyncio.create_subprocess_exec("sh", "-c", script, **pipes, start_new_session=True))
        return begun[-1]

    async def main() -> None:
        builder = Builder(settings)

        def build() -> Any:
            return builder.build(["--context", "text.txt"], settings.store.path, lambda *told: None, nice=0)

        await build()
        assert begun[0].returncode is not None, "no service has been started that would need it again"
        builder.start()
        await asyncio.gather(build(), build())
        assert builder._used is not None and builder._used.returncode is None
        await builder.close()
        assert len(begun) > 2 and all(process.returncode is not None for process in begun)

    monkeypatch.setattr(Builder, "_begin", begin)
    asyncio.run(main())


def test_a_build_cancelled_while_waiting_for_its_process_starts_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    async def begin(*args: Any, **kwargs: Any) -> Process:
        begun.append(args)
        raise OSError

    async def main() -> None:
        builder = Builder(settings)
        builder.start(settle_s=1000.0)
        ended = asyncio.create_task(builder.build(["--context", "text.txt"], settings.store.path, lambda *told: None))
        await asyncio.sleep(0)
        ended.cancel()
        await asyncio.wait([ended])
        assert ended.cancelled() and not begun
        await builder.close()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    asyncio.run(main())
