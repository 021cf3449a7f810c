"""Signals that a library takes for itself when it starts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_handlers() -> Iterator[None]:
    """SIGTERM and SIGINT are handled behind the block as before it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may, nor has the library
            for number, handler in handlers.items():
                signal.signal(number, handler)
