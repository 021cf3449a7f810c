"""How threads without the GIL come to their work: posts, which they look at in turn, and what is opened there.

A post is a kind of work, some words that its threads share with whoever has such work. Who has puts a number of its
own, above 0, into the word OPENED; a thread that joins counts itself in and out at INSIDE, and calls the post's stage.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, call_stage
from csattn.cpu.atomics import add, load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.waiting import PAUSES, now_ns, pause, sleep_us, wait, yield_core

LINE = 8  # words of a cache line: each shared word has one to itself
OPENED = 0 * LINE  # number of the work that may be joined, 0: none
INSIDE = 1 * LINE  # threads that have joined
FAILED = 2 * LINE  # a thread met an error: nobody waits any longer
NUM_POST_WORDS = 3 * LINE

# The table that threads go by: a line for themselves, then one for each post
STOPPED = 0  # nothing will come any more
MAX_POSTS = 3
WORDS, STAGE, ARGUMENT = range(3)  # addresses; the stage is called with the argument's and the thread's number
TABLE_WORDS = (1 + MAX_POSTS) * LINE

IDLE, CLOSED = 0, -1  # what is waited for in vain
NAP_US = 50


@exact_kernel
def list_post(table: NDArray[np.int64], number: int, words: int, stage: int, argument: int) -> None:
    """Let threads look there, too."""
    line = (1 + number) * LINE
    table[line + STAGE], table[line + ARGUMENT] = stage, argument
    store_release(table, line + WORDS, words)


@exact_kernel
def serve(table: NDArray[np.int64], seen: NDArray[np.int64], thread: int, spin_ns: int, nap_ns: int) -> int:
    """Do what is opened, one after the other; CLOSED, or IDLE when nothing has come for nap_ns.

    seen [MAX_POSTS]: the last number at each post, written. While nothing comes, look for spin_ns without a rest, then
    every NAP_US.
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
    """Do what is opened at the first post that has anything new for this thread; false if none has."""
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
        joined = load_acquire(words, OPENED) == number  # or was closed meanwhile
        if joined:
            seen[post] = number
            call_stage(table[line + STAGE], table[line + ARGUMENT], thread, 0, 0)
        add(words, INSIDE, -1)
        if joined:
            return True
    return False


@exact_kernel
def await_others(words: NDArray[np.int64]) -> None:
    """Wait until no thread is inside, unless one has failed there: only then may change what threads read."""
    turn = 0
    while load_acquire(words, INSIDE) > 0 and load_acquire(words, FAILED) == 0:
        wait(turn)
        turn += 1
