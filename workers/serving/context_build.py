"""Build contexts in processes of their own: the command line's `build`, at a low priority."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csattn.build_options import BuildOptions
from csattn.errors import CsattnError
from workers.settings import Settings

SETTLE_S = 20.0  # before a process comes up that nobody needs yet
BEHIND = 10  # niceness of a build that nobody waits for: decoding comes first
_GRACE_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 500

OnProgress = Callable[[float, str], None]  # share done, what it is at


class BuildFailedError(CsattnError):
    """The build ended without an artifact."""


class Builder:
    """For one event loop. While it is started one process is up that waits for the next build: imports take seconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._standby: asyncio.Task[Process] | None = None

    def start(self, settle_s: float = SETTLE_S) -> None:
        """settle_s: before the process comes up, for what is more urgent."""
        self._standby = asyncio.create_task(self._begin(settle_s))

    async def close(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            await self._give_up(standby)

    async def build(
        self, source: list[str], store: Path, on_progress: OnProgress, nice: int = BEHIND
    ) -> dict[str, Any]:
        """The JSON object of `csattn build`. Cancelling ends the process; a build goes on where one was ended.

        source: what it is built of, as the verb's option.
        """
        process = await self._take()
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(json.dumps(_arguments(source, store, self._settings)).encode() + b"\n")
            process.stdin.close()
            lines, last_words = await asyncio.gather(process.stdout.read(), _follow(process.stderr, on_progress))
            exit_code = await process.wait()
        finally:
            await asyncio.shield(_end(process))
        return _result(lines, exit_code, last_words)

    async def _take(self) -> Process:
        """The one that waits, if it is up; then another takes its place, a little later."""
        standby = self._standby
        if standby is None:
            return await self._begin()
        self.start()
        if standby.done() and not standby.exception() and standby.result().returncode is None:
            return standby.result()
        await self._give_up(standby)
        return await self._begin()

    async def _begin(self, settle_s: float = 0.0) -> Process:
        await asyncio.sleep(settle_s)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from workers.cli.standby import main; main()"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # an interrupt of the service is not one of the build
        )

    async def _give_up(self, standby: asyncio.Task[Process]) -> None:
        standby.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await _end(await standby)


def _arguments(source: list[str], store: Path, settings: Settings) -> list[str]:
    build, model = settings.build, settings.model
    options = BuildOptions(
        model=model.name,
        preset=build.preset,
        dtype=build.dtype,
        weights=model.weights,
        chat=build.chat,
        kmeans=build.kmeans,
    )
    where = ["--store", str(store), "--device", build.device]
    return ["build", "--json", "--progress", "json", *source, *where, *options.flags]


async def _follow(stderr: asyncio.StreamReader, on_progress: OnProgress) -> str:
    """Report progress; return the last line that is none."""
    last_words = ""
    while line := await stderr.readline():
        try:
            line_json = json.loads(line)
            where = f"layer {line_json['layer']} of {line_json['layers']}, {line_json['phase']}"
            on_progress(float(line_json["progress"]), where)
        except (ValueError, KeyError, TypeError):
            last_words = line.decode(errors="replace").strip() or last_words
    return last_words


def _result(lines: bytes, exit_code: int, last_words: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(lines.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        result = {}
    if exit_code == 0 and "artifact" in result:
        return result
    if "error" in result:
        raise BuildFailedError(str(result["error"]["message"])[:_MAX_SHOWN])
    how = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    raise BuildFailedError(
        f"the build {how} ({last_words[:_MAX_SHOWN] or 'it said nothing'}); register the context again to go on where "
        "it stopped"
    )


async def _end(process: Process) -> None:
    """No process is left behind."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
