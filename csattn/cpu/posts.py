"""How threads without the GIL get work: they poll posts, at which work is opened.

A post stands for one kind of work, and is a few words of memory that the threads share with the code that has the work.
To open work, that code writes a new number above 0 to the word OPENED. A thread that joins increments INSIDE, calls the
post's stage, and decrements INSIDE.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, call_stage
from csattn.cpu.atomics import add, load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.waiting import PAUSES, now_ns, pause, sleep_us, wait, yield_core

LINE = 8  # words of a cache line: each shared word has its own line
OPENED = 0 * LINE  # number of the work that may be joined; 0: none
INSIDE = 1 * LINE  # how many threads have joined
FAILED = 2 * LINE  # nonzero after an error in a thread: nothing waits any longer
NUM_POST_WORDS = 3 * LINE

# The table that threads read: a line of general words, then one for each post
STOPPED = 0  # nonzero: no more work will come
MAX_POSTS = 3
WORDS, STAGE, ARGUMENT = range(3)  # addresses; the stage is called with the argument's and the thread's number
TABLE_WORDS = (1 + MAX_POSTS) * LINE

IDLE, CLOSED = 0, -1  # results of `poll_for_work`
NAP_US = 50


@exact_kernel
def list_post(table: NDArray[np.int64], number: int, words: int, stage: int, argument: int) -> None:
    """Add a post to the table that threads poll."""
    line = (1 + number) * LINE
    table[line + STAGE], table[line + ARGUMENT] = stage, argument
    store_release(table, line + WORDS, words)


@exact_kernel
def poll_for_work(table: NDArray[np.int64], seen: NDArray[np.int64], thread: int, spin_ns: int, nap_ns: int) -> int:
    """Do work as it is opened. Return CLOSED when stopped, or IDLE after nap_ns without work.

    seen [MAX_POSTS]: the number of the last work done at each post, updated. Without work, poll continuously for
    spin_ns, then every NAP_US.
    """
    turn, since = 0, now_ns()
    while load_acquire(table, STOPPED) == 0:
        if _join(table, seen, thread):
            turn, since = 0, now_ns()
            continue
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
def _join(table: NDArray[np.int64], seen: NDArray[np.int64], thread: int) -> bool:
    """Do the work at the first post that has something new for this thread; return False if none has."""
    for post in range(MAX_POSTS):
        line = (1 + post) * LINE
        address = load_acquire(table, line + WORDS)
        if address == 0:
            continue
        words = array_at(address, NUM_POST_WORDS, np.int64(0))
        number = load_acquire(words, OPENED)
        if number == 0 or number == seen[post]:
            continue
        add(words, INSIDE, 1)
        joined = load_acquire(words, OPENED) == number  # else it was closed meanwhile
        if joined:
            seen[post] = number
            call_stage(table[line + STAGE], table[line + ARGUMENT], thread, 0, 0)
        add(words, INSIDE, -1)
        if joined:
            return True
    return False


@exact_kernel
def await_others(words: NDArray[np.int64]) -> None:
    """Wait until no thread is inside, or one has failed. Only then may memory that threads read be changed."""
    turn = 0
    while load_acquire(words, INSIDE) > 0 and load_acquire(words, FAILED) == 0:
        wait(turn)
        turn += 1
