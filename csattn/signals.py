"""Signals that end a service, and protection of their handlers from a library that replaces them when it starts."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a service: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    heeded = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *heeded]


@contextmanager
def own_handlers(undo: Callable[[], object]) -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT after the block.

    If SystemExit leaves the block, `undo` is called. An exit by the library's own handler of SIGTERM, as Ray has one,
    gets the exit code that shells give that signal.
    Of SIGHUP and, without a terminal, SIGTERM, those that have handlers are blocked in the block and in processes
    started there, and delivered to this process after it at the latest: terminals and supervisors such as systemd send
    them to those processes too, but this process ends them.
    """
    # Ray ends its own processes by SIGTERM: with it blocked, each takes a second longer. A terminal does not send it.
    spared = [signal.SIGHUP] if os.isatty(0) else [signal.SIGHUP, signal.SIGTERM]
    # without a handler, a signal ends this process at once, so it has to end the processes that it started, too
    blocked = [number for number in spared if callable(signal.getsignal(number))]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # child processes inherit it
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():  # no other may set handlers, and none was set
                for number, handler in handlers.items():
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except SystemExit as ended:
        undo()
        if ended.code == signal.SIGTERM:
            raise SystemExit(TERMINATED) from None
        raise
