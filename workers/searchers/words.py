"""Words of shared memory by which one process waits for another: it spins for a while, then sleeps.

A process that is about to sleep sets a word, then checks once more. The writer checks that word after writing, and
wakes the sleeper if it is set. The operations are sequentially consistent, so one of the two sees the other's word: no
wake-up is lost.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.atomics import load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.posts import LINE
from csattn.cpu.waiting import PAUSES, now_ns, pause, yield_core

LAST_REQUEST = 0 * LINE  # number of the last request
LAST_ANSWER = 1 * LINE  # number of the last answered request
WORKER_SLEEPS = 2 * LINE  # 1: wake the worker up
CLIENT_SLEEPS = 3 * LINE  # 1: wake the client up


@exact_kernel
def post(words: NDArray[np.int64], at: int, value: int, sleeper: int) -> bool:
    """Publish the value, and all that was written before. True if the reader sleeps and must be woken up."""
    store_release(words, at, value)
    sleeps: bool = load_acquire(words, sleeper) != 0
    return sleeps


@exact_kernel
def await_word(words: NDArray[np.int64], at: int, value: int, sleeper: int, spin_ns: int) -> bool:
    """Spin for the value for up to spin_ns. False: it has not come, and its writer will wake this process up."""
    store_release(words, sleeper, 0)
    if load_acquire(words, at) == value:
        return True
    since = now_ns()
    while spin_ns > 0 and now_ns() - since < spin_ns:
        for _ in range(PAUSES):
            if load_acquire(words, at) == value:
                return True
            pause()
        yield_core()
    store_release(words, sleeper, 1)
    if load_acquire(words, at) != value:
        return False
    store_release(words, sleeper, 0)
    return True


def compile_words() -> None:
    """Compile the kernels, or load them from the cache, before the first search needs them."""
    words = np.zeros(4 * LINE, np.int64)
    post(words, LAST_REQUEST, 1, WORKER_SLEEPS)
    await_word(words, LAST_REQUEST, 1, WORKER_SLEEPS, 0)
