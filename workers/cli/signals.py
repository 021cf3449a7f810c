"""How a command ends by Ctrl-C or by a supervisor's SIGTERM: in the same way, with the signal's exit code."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_received = signal.SIGINT


def record_signal(number: int) -> None:
    """Record that a signal has come."""
    global _received
    _received = signal.Signals(number)


def exit_code() -> int:
    """Return the exit code that shells give the recorded signal."""
    return 128 + _received


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM within the block, so that interrupted work reports what becomes of it."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: object) -> None:
    record_signal(number)
    raise KeyboardInterrupt
