"""Let one process compile a kernel; others that need it meanwhile wait and find it in the cache.

Processes that start together, such as search workers, need the same kernels: half a minute of work for one core.
"""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

WAIT_S = 60.0  # for another process, which may be stopped and never finish
POLL_S = 0.02


class CompileLock:
    """A lock between processes that compile. Each locks at most one file at a time, so they cannot deadlock.

    Callers hold numba's compiler lock.
    """

    def __init__(self) -> None:
        self._depth = 0  # compilations in progress: a kernel compiles those that it calls
        self._locked: int | None = None  # file descriptor
        self._waits = True

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth and self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def acquire(self, file: str) -> bool:
        """Wait until no other process compiles a kernel of this source file; False if there was nothing to wait for."""
        if not self._depth or self._locked is not None or not self._waits:
            return False
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:  # imported from an archive
            return False
        if not self._lock(descriptor):
            os.close(descriptor)
            return False
        self._locked = descriptor
        return True

    def _lock(self, descriptor: int) -> bool:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    self._waits = False  # nor for any other kernel
                    return False
                time.sleep(POLL_S)
            except OSError:  # a file system without locks
                return False
            else:
                return True


_compile_lock = CompileLock()


def compile_under_lock(kernel: Any, file: str) -> None:
    """Have a numba kernel with a cache hold the lock while it is compiled. file: its source."""
    load, compile_one = kernel._cache.load_overload, kernel.compile

    def load_or_wait(*key: Any) -> Any:
        found = load(*key)
        return load(*key) if found is None and _compile_lock.acquire(file) else found

    def compile_locked(*signature: Any) -> Any:
        with global_compiler_lock, _compile_lock, _interrupts_reraised():
            return compile_one(*signature)

    kernel._cache.load_overload, kernel.compile = load_or_wait, compile_locked


@contextmanager
def _interrupts_reraised() -> Iterator[None]:
    """Make sure that Ctrl-C ends the block, at its end if not at once.

    LLVM calls back into Python, and an exception raised there is printed and lost.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    raised: list[BaseException] = []

    def handle(number: int, frame: Any) -> None:
        try:
            before(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if raised:  # replaces any other exception
            raise raised[0]
