"""A thread that runs calls in the background."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Call = tuple[Callable[[], None], "Future[None]"]


class BackgroundThread:
    """Runs one call at a time in a daemon thread, which does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, call: Callable[[], None]) -> "Future[None]":
        """Queue a call. The future has its exception, if it raises one."""
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done


def _run(calls: "SimpleQueue[_Call | None]") -> None:
    while (item := calls.get()) is not None:
        call, done = item
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del item, call, done  # else they would live until the next call
