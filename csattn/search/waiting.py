"""How threads wait for work without the GIL: words that they share with whoever has some, and how long they look.

Whoever has work puts a number of its own, above 0, into the word OPENED; threads that join it count themselves in and
out at INSIDE. What the work is they find elsewhere.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel
from csattn.search.atomics import add, load_acquire, now_ns, pause, sleep_us, yield_core

LINE = 8  # words of a cache line: each shared word has one to itself
OPENED = 0 * LINE  # number of the work that may be joined, 0: none
INSIDE = 1 * LINE  # threads that have joined
STOPPED = 2 * LINE  # nothing will come any more
NUM_WAITING_WORDS = 3 * LINE

IDLE, CLOSED = 0, -1  # what is waited for in vain
PAUSES = 64  # a few microseconds: waiting any longer, a thread lets others have the core
NAP_US = 50


@exact_kernel
def await_work(words: NDArray[np.int64], last_number: int, spin_ns: int, nap_ns: int) -> int:
    """Join the next work, but for that of `last_number`, and return its number; or IDLE, or CLOSED.

    While nothing comes, look for spin_ns without a rest, then every NAP_US; IDLE after nap_ns. Who has joined leaves
    with `leave_work`.
    """
    turn, since = 0, now_ns()
    while load_acquire(words, STOPPED) == 0:
        number: int = load_acquire(words, OPENED)
        if number != 0 and number != last_number:
            add(words, INSIDE, 1)
            if load_acquire(words, OPENED) == number:
                return number
            leave_work(words)  # it was closed meanwhile
        turn += 1
        pause()
        if turn % PAUSES == 0:
            waited_ns = now_ns() - since
            if waited_ns > nap_ns:
                return IDLE
            if waited_ns > spin_ns:
                sleep_us(NAP_US)
            else:
                yield_core()
    return CLOSED


@exact_kernel
def leave_work(words: NDArray[np.int64]) -> None:
    add(words, INSIDE, -1)


@exact_kernel
def await_leave(words: NDArray[np.int64]) -> None:
    """Wait until no thread is inside: only then may what it has read change."""
    turn = 0
    while load_acquire(words, INSIDE) > 0:
        wait(turn)
        turn += 1


@exact_kernel
def wait(turn: int) -> None:
    """A moment, the turn-th in a row."""
    if turn < PAUSES:
        pause()
    else:
        yield_core()
