"""Ctrl-C comes between steps: threads may still be at work on a step that is left in its middle."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Have SIGINT wait for the block's end, on the main thread: others do not get it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    come: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: come.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if come:
            signal.raise_signal(signal.SIGINT)
