"""One process compiles a kernel; others that want it meanwhile find it in the cache.

Processes that begin together, such as search workers, want the same kernels, half a minute's work of one core.
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

WAIT_S = 60.0  # for another process; one that is stopped may never be done
LOOK_S = 0.02


class CompileTurn:
    """Of this process. At most one file is locked at a time, so that processes cannot wait for each other.

    Whoever uses it holds numba's lock of the process.
    """

    def __init__(self) -> None:
        self._depth = 0  # kernels that are compiled for one another
        self._locked: int | None = None  # the file's descriptor
        self._waits = True

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth and self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def take(self, file: str) -> bool:
        """Wait until nobody else compiles what is in a source file; False where that is of no use."""
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
                    self._waits = False  # for no other kernel either
                    return False
                time.sleep(LOOK_S)
            except OSError:  # a file system without locks
                return False
            else:
                return True


_turn = CompileTurn()


def compile_in_turn(kernel: Any, file: str) -> None:
    """kernel: of numba, with a cache; file: its source."""
    load, compile_one = kernel._cache.load_overload, kernel.compile

    def load_or_wait(*key: Any) -> Any:
        found = load(*key)
        return load(*key) if found is None and _turn.take(file) else found

    def compile_alone(*signature: Any) -> Any:
        with global_compiler_lock, _turn, _interrupts_heard():
            return compile_one(*signature)

    kernel._cache.load_overload, kernel.compile = load_or_wait, compile_alone


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """Have Ctrl-C end the block, if not at once, then at its end: LLVM calls back into Python, and what is raised there
    is printed and lost."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    raised: list[BaseException] = []

    def hear(number: int, frame: Any) -> None:
        try:
            before(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if raised:  # also in the place of what else failed meanwhile
            raise raised[0]
