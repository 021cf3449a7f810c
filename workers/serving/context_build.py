"""Builds contexts in child processes, by the command line's `build` at a low priority."""

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

SETTLE_S = 20.0  # delay before a standby process starts
KEEP_S = 20.0  # how long a process that has built waits for another build, with its model loaded
BUILD_NICENESS = 10  # niceness of a build that nobody waits for, relative to this process: decoding comes first
BUILT = "built"  # the line that ends a build's output, on stdout and on stderr
WAITS = "another process is building this artifact; waiting for it"  # a line of stderr
_GRACE_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 500

OnProgress = Callable[[float, str, str], None]  # takes the share that is done, the phase and the artifact's id


class BuildFailedError(CsattnError):
    """The build ended without an artifact."""


class Builder:
    """Runs builds. For one event loop.

    Between `start` and `close`, a standby process waits for the next build, because imports take seconds. A process
    that has built also waits for KEEP_S: it has the model loaded.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._standby: asyncio.Task[Process] | None = None
        self._used: Process | None = None
        self._expiry: asyncio.TimerHandle | None = None  # ends `_used`

    def start(self, settle_s: float = SETTLE_S) -> None:
        """Start a standby process after settle_s, which leaves the machine to more urgent work first."""
        self._standby = asyncio.create_task(self._begin(settle_s))

    async def close(self) -> None:
        standby, self._standby = self._standby, None
        if (used := self._take_used()) is not None:
            await _end(used)
        if standby is not None:
            await self._cancel_standby(standby)

    async def build(
        self, source: list[str], store: Path, on_progress: OnProgress, nice: int = BUILD_NICENESS
    ) -> dict[str, Any]:
        """Run `csattn build`, and return the JSON object that it prints. Raises BuildFailedError.

        Cancelling ends the process; the next build of the same context continues where it stopped. source: the option
        that names what is built. nice: niceness relative to this process.
        """
        process, is_built = await self._take(nice), False
        try:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(json.dumps(_arguments(source, store, self._settings)).encode() + b"\n")
            lines, log = list[str](), BuildLog(on_progress)
            is_built, _ = await asyncio.gather(_read(process.stdout, lines.append), _read(process.stderr, log.add))
            exit_code = 0 if is_built else await process.wait()
        finally:
            if not (is_built and self._keep(process)):
                await asyncio.shield(_end(process))
        return _result(lines, exit_code, log.last_line)

    async def _take(self, nice: int) -> Process:
        """Take the process that has built, or the standby process, which another one replaces a little later."""
        used = self._take_used()
        if used is not None:
            if _set_nice(used, nice):
                return used
            await _end(used)  # without privileges, its priority cannot be raised again
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
        await self._cancel_standby(standby)
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
        self._expiry = asyncio.get_running_loop().call_later(KEEP_S, self._end_used)
        return True

    def _end_used(self) -> None:
        if (used := self._take_used()) is not None and used.stdin is not None:
            used.stdin.close()  # the process ends at the end of its input

    async def _begin(self, settle_s: float = 0.0) -> Process:
        await asyncio.sleep(settle_s)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from workers.cli.standby import main; main()"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # so that an interrupt (Ctrl-C) of the service does not reach the build
        )

    async def _cancel_standby(self, standby: asyncio.Task[Process]) -> None:
        standby.cancel()
        await asyncio.wait([standby])  # not `await standby`: its CancelledError could not be told from this task's own
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
    """Pass on a build's lines. True if the build has ended (BUILT), false if its process has."""
    while line := await stream.readline():
        text = line.decode(errors="replace").strip()
        if text == BUILT:
            return True
        add(text)
    return False


class BuildLog:
    """Reads what a build writes to stderr: progress as JSON, and other lines, of which the last is kept."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress, self.last_line = on_progress, ""

    def add(self, line: str) -> None:
        if line == WAITS:
            self._on_progress(0.0, line, "")
        try:
            state = json.loads(line)
            phase = f"layer {state['layer']} of {state['layers']}, {state['phase']}"
            self._on_progress(float(state["progress"]), phase, str(state["artifact"]))
        except (ValueError, KeyError, TypeError):
            self.last_line = line or self.last_line


def _result(lines: list[str], exit_code: int, last_line: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        result = {}
    if exit_code == 0 and "artifact" in result:
        return result
    if "error" in result:
        raise BuildFailedError(str(result["error"]["message"])[:_MAX_SHOWN])
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    raise BuildFailedError(
        f"the build {how} ({last_line[:_MAX_SHOWN] or 'without a message'}); register the context again to continue "
        "where it stopped"
    )


def _set_nice(process: Process, nice: int) -> bool:
    """Set the niceness of the process's group, which it leads, relative to this process; false if not permitted."""
    try:
        os.setpriority(os.PRIO_PGRP, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # with autogroup scheduling, a process's niceness counts only in its session
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))
    return True


async def _end(process: Process) -> None:
    """End the process and close its pipes: neither may be left behind."""
    try:
        if process.returncode is None:
            await _wait_for_end(process)
    finally:  # in newer releases of Python, `wait` may return before the pipes are closed
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)  # the transport closes in the event loop's next iteration


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
