"""Build contexts in processes of their own: the command line's `build`, at a low priority."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio import StreamReader
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csattn.build_options import BuildOptions
from csattn.errors import CsattnError
from workers.settings import Settings

SETTLE_S = 20.0  # before a process comes up that nobody needs yet
KEEP_S = 20.0  # that one which has built keeps its model for another build
BEHIND = 10  # niceness of a build that nobody waits for: decoding comes first
BUILT = "built"  # a line of its own behind what a build has said, on stdout and on stderr
_GRACE_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 500

OnProgress = Callable[[float, str], None]  # share done, what it is at


class BuildFailedError(CsattnError):
    """The build ended without an artifact."""


class Builder:
    """For one event loop. While it is started one process is up that waits for the next build: imports take seconds.

    A process that has built waits, too, for a while: it has the model.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._standby: asyncio.Task[Process] | None = None
        self._used: Process | None = None
        self._expiry: asyncio.TimerHandle | None = None  # of the used one

    def start(self, settle_s: float = SETTLE_S) -> None:
        """settle_s: before the process comes up, for what is more urgent."""
        self._standby = asyncio.create_task(self._begin(settle_s))

    async def close(self) -> None:
        standby, self._standby = self._standby, None
        if (used := self._take_used()) is not None:
            await _end(used)
        if standby is not None:
            await self._give_up(standby)

    async def build(
        self, source: list[str], store: Path, on_progress: OnProgress, nice: int = BEHIND
    ) -> dict[str, Any]:
        """The JSON object of `csattn build`. Cancelling ends the process; a build goes on where one was ended.

        source: what it is built of, as the verb's option.
        """
        process, is_built = await self._take(nice), False
        try:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(json.dumps(_arguments(source, store, self._settings)).encode() + b"\n")
            said, told = list[str](), Told(on_progress)
            is_built, _ = await asyncio.gather(_read(process.stdout, said.append), _read(process.stderr, told.add))
            exit_code = 0 if is_built else await process.wait()
        finally:
            if not (is_built and self._keep(process)):
                await asyncio.shield(_end(process))
        return _result(said, exit_code, told.last_words)

    async def _take(self, nice: int) -> Process:
        """The one that has built, or the one that waits; then another takes its place, a little later."""
        used = self._take_used()
        if used is not None:
            if _set_nice(used, nice):
                return used
            await _end(used)  # it may not come forward again
        process = await self._take_standby()
        _set_nice(process, nice)
        return process

    async def _take_standby(self) -> Process:
        standby = self._standby
        if standby is None:
            return await self._begin()
        self.start()
        if standby.done() and not standby.exception() and standby.result().returncode is None:
            return standby.result()
        await self._give_up(standby)
        return await self._begin()

    def _take_used(self) -> Process | None:
        used, self._used = self._used, None
        if self._expiry is not None:
            self._expiry.cancel()
        return None if used is None or used.returncode is not None else used

    def _keep(self, process: Process) -> bool:
        if self._standby is None or self._used is not None:
            return False
        self._used = process
        self._expiry = asyncio.get_running_loop().call_later(KEEP_S, self._let_go)
        return True

    def _let_go(self) -> None:
        if (used := self._take_used()) is not None and used.stdin is not None:
            used.stdin.close()  # it ends by itself

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
        await asyncio.wait([standby])  # and not the task itself: that this one is cancelled is another matter
        if not standby.cancelled() and not standby.exception():
            await _end(standby.result())


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


async def _read(stream: StreamReader, add: Callable[[str], None]) -> bool:
    """All lines of a build; whether it came to its end, and not the process."""
    while line := await stream.readline():
        text = line.decode(errors="replace").strip()
        if text == BUILT:
            return True
        add(text)
    return False


class Told:
    """What a build writes to stderr: how far it is, or words."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress, self.last_words = on_progress, ""

    def add(self, line: str) -> None:
        try:
            told = json.loads(line)
            self._on_progress(float(told["progress"]), f"layer {told['layer']} of {told['layers']}, {told['phase']}")
        except (ValueError, KeyError, TypeError):
            self.last_words = line or self.last_words


def _result(said: list[str], exit_code: int, last_words: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(said[-1])
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


def _set_nice(process: Process, nice: int) -> bool:
    """All its threads, behind this process by that much; whether they may be. It leads its process group."""
    try:
        os.setpriority(os.PRIO_PGRP, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # where the kernel shares time out by sessions, niceness counts inside one only
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))
    return True


async def _end(process: Process) -> None:
    """No process is left behind, and no pipe to one."""
    try:
        if process.returncode is None:
            await _wait_for_end(process)
    finally:  # newer releases of Python do not wait in `wait` until pipes have been seen to end
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)  # it is done in the loop's next turn


async def _wait_for_end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
