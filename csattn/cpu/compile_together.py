"""Compile stages in several processes at once: within one process, numba compiles one kernel at a time.

python -m csattn.cpu.compile_together   compiles the stages that each line of standard input names, into the cache
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from threading import Thread

from csattn.cpu.addresses import KindStage, Stage, compiled_address, is_uncached

MOST_OTHERS = 3  # processes: each takes up to 0.5 GB


def compile_together(stages: Iterable[Stage], num_cpus: int) -> None:
    """Compile stages that the cache lacks, in this process and, on several cores, in others, which end with this call.

    If one of them fails, or there is no cache, a stage is compiled when it is first needed.
    """
    by_file: dict[str, list[Stage]] = {}
    for stage in filter(is_uncached, dict.fromkeys(stages)):
        by_file.setdefault(_function(stage).__code__.co_filename, []).append(stage)
    left = deque(by_file.values())  # processes that compile kernels of one file wait for each other
    num_others = min(num_cpus - 1, len(left) - 1, MOST_OTHERS)
    others = [Thread(target=_compile_elsewhere, args=(left,), daemon=True) for _ in range(num_others)]
    for other in others:
        other.start()
    while some := _take(left):
        for stage in some:
            compiled_address(stage)
    for other in others:
        other.join()


def _compile_elsewhere(left: deque[list[Stage]]) -> None:
    """Have a process of its own compile stages until none are left."""
    command = [sys.executable, "-P", "-m", "csattn.cpu.compile_together"]  # -P: modules are found where they are here
    places = {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with (
        suppress(OSError),
        subprocess.Popen(command, text=True, env=os.environ | places, **pipes) as process,  # type: ignore[call-overload]
    ):
        is_alive = True
        while is_alive and (some := _take(left)):
            print(*map(_name, some), file=process.stdin, flush=True)
            is_alive = bool(process.stdout.readline())


def _take(left: deque[list[Stage]]) -> list[Stage]:
    """Remove the stages of one file; returns none if none are left."""
    try:
        return left.popleft()
    except IndexError:
        return []


def _compile_named(names: Sequence[str]) -> None:
    for name in names:
        module, function, kind = name.split(":")
        stage = getattr(import_module(module), function)
        compiled_address(KindStage(stage, kind) if kind else stage)


def _name(stage: Stage) -> str:
    function = _function(stage)
    return f"{function.__module__}:{function.__qualname__}:{stage.kind if isinstance(stage, KindStage) else ''}"


def _function(stage: Stage):  # type: ignore[no-untyped-def]
    return stage.function if isinstance(stage, KindStage) else stage


if __name__ == "__main__":
    for line in sys.stdin:
        _compile_named(line.split())
        print("done", flush=True)
