"""Steps on a device, and work beside them, in a thread and on a stream of its own."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from threading import Lock
from typing import TypeVar

import torch

_T = TypeVar("_T")
_PAUSE_S = 0.001  # between two checks whether the work is done, when `meanwhile` has nothing to do
_locks = defaultdict[torch.device, Lock](Lock)


def stream_thread(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread with its own stream: its work on the device and steps do not wait for each
    other."""

    def use_own_stream() -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    return ThreadPoolExecutor(1, name, use_own_stream)


def one_step_at_a_time(device: torch.device) -> Lock:
    """Return the lock that a step holds while it runs on a device.

    Blocks of a search wait for each other: those of two steps at once could each get a part of the device, and hang.
    """
    return _locks[device]


def synchronize_stream(device: torch.device) -> None:
    """Wait for what the calling thread has enqueued on its stream; then any stream may read the results."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def run_in_thread(thread: Executor, work: Callable[[], _T], meanwhile: Callable[[], None]) -> _T:
    """Run `work` in that thread, and call `meanwhile` until it is done. Raises what either raises, once `work` ends."""
    running = thread.submit(work)
    try:
        while not running.done():
            meanwhile()
            wait([running], _PAUSE_S)
    finally:
        wait([running])
    return running.result()
