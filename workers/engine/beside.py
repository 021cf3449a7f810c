"""Work on a device beside its steps, by a thread and on a stream of its own."""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from threading import Event

import torch

_PAUSE_S = 0.001  # between two looks whether work is done, where nothing else is to do


def thread_beside(device: torch.device, name: str) -> ThreadPoolExecutor:
    """One thread; what it enqueues on the device waits for no step, and no step for it."""

    def take_a_stream() -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    return ThreadPoolExecutor(1, name, take_a_stream)


def finish_beside(device: torch.device) -> None:
    """Wait for what the calling thread has enqueued: any stream may read it then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def run_beside(thread: Executor, work: Callable[[Callable[[], None]], None], meanwhile: Callable[[], None]) -> None:
    """Do `work` by that thread, and call `meanwhile` until it is done. Raises what either raises, when it is over.

    work: is given what waits until `meanwhile` was called again, for parts that the driver does nothing else beside.
    """
    was_called, is_over = Event(), Event()

    def give_way() -> None:
        was_called.clear()
        while not (is_over.is_set() or was_called.wait(_PAUSE_S)):
            pass

    running = thread.submit(work, give_way)
    try:
        while not running.done():
            meanwhile()
            was_called.set()
            wait([running], _PAUSE_S)
    finally:
        is_over.set()
        wait([running])
    running.result()
