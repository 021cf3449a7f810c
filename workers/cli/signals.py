"""How a command ends by Ctrl-C or by a supervisor's SIGTERM: in the same way, with the signal's exit code."""

import signal
from collections.abc import Iterable, Iterator
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
def as_interrupts(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Raise KeyboardInterrupt for these signals within the block, so that interrupted work cleans up and reports what
    becomes of it."""
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _: object) -> None:
    record_signal(number)
    raise KeyboardInterrupt
