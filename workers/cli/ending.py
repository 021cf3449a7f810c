"""How a command ends by Ctrl-C or by a supervisor's SIGTERM: in the same way, with the signal's exit code."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_told_by = signal.SIGINT


def tell(number: int) -> None:
    """Record that a signal has come."""
    global _told_by
    _told_by = signal.Signals(number)


def exit_code() -> int:
    """Return the exit code that shells give the recorded signal."""
    return 128 + _told_by


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM within the block, so that interrupted work reports what becomes of it."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: object) -> None:
    tell(number)
    raise KeyboardInterrupt
