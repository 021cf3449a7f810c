"""Build a context in a process of its own: the command line's `build`, at a low priority."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csattn.build_options import BuildOptions
from csattn.errors import CsattnError
from workers.settings import Settings

BEHIND = 10  # niceness of a build that nobody waits for: decoding comes first
_GRACE_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 500

OnProgress = Callable[[float, str], None]  # share done, what it is at


class BuildFailedError(CsattnError):
    """The build ended without an artifact."""


async def build_context(
    source: list[str], store: Path, settings: Settings, on_progress: OnProgress, nice: int = BEHIND
) -> dict[str, Any]:
    """The JSON object of `csattn build`. Cancelling ends the process; a build goes on where one was ended.

    source: what it is built of, as the verb's option.
    """
    process = await asyncio.create_subprocess_exec(
        *_command(source, store, settings),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,  # an interrupt of the service is not one of the build
    )
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        assert process.stdout is not None and process.stderr is not None
        lines, last_words = await asyncio.gather(process.stdout.read(), _follow(process.stderr, on_progress))
        exit_code = await process.wait()
    finally:
        await asyncio.shield(_end(process))
    return _result(lines, exit_code, last_words)


def _command(source: list[str], store: Path, settings: Settings) -> list[str]:
    build, model = settings.build, settings.model
    options = BuildOptions(
        model=model.name,
        preset=build.preset,
        dtype=build.dtype,
        weights=model.weights,
        chat=build.chat,
        kmeans=build.kmeans,
    )
    return [
        *(sys.executable, "-c", "from workers.cli import main; main()", "build", "--json", "--progress", "json"),
        *(*source, "--store", str(store), "--device", build.device, *options.flags),
    ]


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


async def _end(process: asyncio.subprocess.Process) -> None:
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
