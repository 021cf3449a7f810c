"""Words of memory that two processes share, and how one waits for the other: it looks for a while, then sleeps.

Whoever is about to sleep says so in a word, then looks once more. Whoever writes looks at that word afterwards, and
wakes the other up if it is set. As all operations keep one order, one of the two sees the other's word.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.atomics import load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.posts import LINE
from csattn.cpu.waiting import PAUSES, now_ns, pause, yield_core

ASKED = 0 * LINE  # number of the last request
ANSWERED = 1 * LINE  # number of the last request that is answered
WORKER_SLEEPS = 2 * LINE
CLIENT_SLEEPS = 3 * LINE


@exact_kernel
def post(words: NDArray[np.int64], at: int, value: int, sleeper: int) -> bool:
    """Publish the value and all that was written before; whether the reader must be woken up."""
    store_release(words, at, value)
    sleeps: bool = load_acquire(words, sleeper) != 0
    return sleeps


@exact_kernel
def await_word(words: NDArray[np.int64], at: int, value: int, sleeper: int, spin_ns: int) -> bool:
    """Look for the value for that long. False: it is not there, and whoever writes it will wake this process up."""
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
    """Compile, or load from the cache: not at the first search."""
    words = np.zeros(4 * LINE, np.int64)
    post(words, ASKED, 1, WORKER_SLEEPS)
    await_word(words, ASKED, 1, WORKER_SLEEPS, 0)
