"""Signals that end a service, and those that a library takes for itself when it starts."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code


def ending_signals() -> list[signal.Signals]:
    """That tell a service to end. The end of its terminal is one, unless nobody is to heed it, as below nohup."""
    heeded = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *heeded]


@contextmanager
def own_handlers(undo: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and SIGINT are handled behind the block as before it. Where an exit leaves it, undo is called; one by the
    library's own handler of SIGTERM, as Ray has it, has the code that shells give that signal. Where SIGHUP has a
    handler, which is called behind the block at the latest, it does nothing to processes that are started within: a
    terminal sends it to them too, and this one ends them."""
    # without a handler it ends this process at once, so that it has to end what is started as well
    blocked = [signal.SIGHUP] if callable(signal.getsignal(signal.SIGHUP)) else []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # processes inherit it
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():  # no other may, nor has the library
                for number, handler in handlers.items():
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except SystemExit as ended:
        undo()
        if ended.code == signal.SIGTERM:
            raise SystemExit(TERMINATED) from None
        raise
