"""How a command ends that is told to, by Ctrl-C or by a supervisor's SIGTERM: the same way, with the signal's code."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_told_by = signal.SIGINT


def tell(number: int) -> None:
    """That signal has come."""
    global _told_by
    _told_by = signal.Signals(number)


def exit_code() -> int:
    """As shells have it."""
    return 128 + _told_by


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """What was under way says what becomes of it."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _: object) -> None:
    tell(number)
    raise KeyboardInterrupt
