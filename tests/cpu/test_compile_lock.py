"""A kernel is compiled once, however many processes want it. One that never finishes is waited for only once."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from numba.core.errors import TypingError

from csattn.cpu import compile_lock
from csattn.cpu.jit import exact_kernel

KERNEL = """
import sys, time
from pathlib import Path
from csattn.cpu.jit import exact_kernel

@exact_kernel
def inner(x):
    total = 0.0
    for i in range(x):
        total += i % 7 * 0.5
    return total

@exact_kernel
def outer(x):
    return inner(x) + 1.0

print("up", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.001)
assert outer(3) == 2.5
print([sum(kernel.stats.cache_misses.values()) for kernel in (inner.in_kernels, outer)])
"""


def doubled(x):
    return 2 * x


def halved(x):
    return x / 2


def test_of_processes_that_start_together_only_one_compiles(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "kernel.py"), str(tmp_path / "go")]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    (tmp_path / "go").touch()
    told = sorted(process.communicate(timeout=120)[0].strip() for process in processes)
    assert told == ["[0, 0]", "[0, 0]", "[1, 1]"]


def test_a_compilation_that_never_finishes_is_waited_for_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_lock, "WAIT_S", 0.5)
    monkeypatch.setattr(compile_lock, "_compile_lock", compile_lock.CompileLock())
    with Path(__file__).open() as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        since = time.monotonic()
        assert exact_kernel(doubled)(21) == 42
        assert time.monotonic() - since > 0.5
        assert exact_kernel(halved)(42) == 21
        assert not compile_lock._compile_lock._waits


def test_the_compile_lock_is_released_after_success_and_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with pytest.raises(TypingError):
        exact_kernel(doubled)(object())
    assert exact_kernel(doubled)(21) == 42
    with Path(__file__).open() as source:
        fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_source_that_cannot_be_locked_does_not_stop_compilation(tmp_path: Path) -> None:
    lock = compile_lock.CompileLock()
    with lock:
        assert not lock.acquire(str(tmp_path / "archive.zip" / "kernel.py"))
    assert not lock.acquire(__file__), "nothing is compiled"


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_swallowed_during_compilation_is_raised_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Otherwise Ctrl-C would be printed and lost while the first answer waits for kernels."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*arguments: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if fails:
            raise OSError("no room for what was compiled")

    kernel = exact_kernel(halved)
    kernel._cache.save_overload = interrupted
    with pytest.raises(KeyboardInterrupt):
        kernel(42)
    assert signal.getsignal(signal.SIGINT) is before
    assert kernel(42) == 21
