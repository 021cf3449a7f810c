"""Work written down once and done often: a list of stages that threads share out, without Python in between.

A stage is a function, the address of what it works on, and a number of pieces. A thread takes a piece by counting up
the stage's counter. A stage may say that it waits: its pieces are taken when all pieces of the stages before are done.
A piece that is taken is worked on without waiting, so some thread can always go on, however many there are.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at, call_stage, compiled_address
from csattn.cpu.atomics import add, load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.posts import FAILED, LINE, NUM_POST_WORDS, OPENED, await_others
from csattn.cpu.waiting import wait

FUNCTION, ARGUMENTS, PIECES, WAITS = range(4)  # of a stage, in `stages`
NUM_FIELDS = 4
MAX_STAGES = 4096
# what threads share besides the words of their post; behind it the stages' counters, each on a line of its own
DONE = NUM_POST_WORDS  # pieces
STAGES = DONE + LINE  # address of the run's `stages`
NUM_STAGES = STAGES + 1
COUNTERS = STAGES + LINE
SHARED_WORDS = COUNTERS + MAX_STAGES * LINE


class Tape:
    """Stages in the order in which they are done. Holds on to what they work on."""

    def __init__(self) -> None:
        self._stages: list[tuple[int, int, int, int]] = []
        self._kept: list[NDArray[np.int64]] = []
        self._array = np.zeros((0, NUM_FIELDS), np.int64)

    def add(self, stage: Stage, arguments: NDArray[np.int64], num_pieces: int = 0, waits: bool = True) -> None:
        """Append a stage. num_pieces may be set before every run, through `pieces`."""
        assert arguments.dtype == np.int64 and arguments.flags.c_contiguous
        self._kept.append(arguments)
        self._stages.append((compiled_address(stage), arguments.ctypes.data, num_pieces, int(waits)))
        self._array = np.array(self._stages, np.int64)

    @property
    def stages(self) -> NDArray[np.int64]:
        """[num_stages, NUM_FIELDS]"""
        return self._array

    @property
    def pieces(self) -> NDArray[np.int64]:
        """[num_stages]: how many pieces each stage has in the next run; may be written."""
        return self._array[:, PIECES]


@exact_kernel
def open_run(stages: NDArray[np.int64], shared: NDArray[np.int64], address: int, number: int) -> None:
    """Let threads join a run of these stages, which lie at that address."""
    for i in range(len(stages)):
        shared[COUNTERS + i * LINE] = 0
    shared[DONE], shared[STAGES], shared[NUM_STAGES] = 0, address, len(stages)
    store_release(shared, OPENED, number)


@exact_kernel
def finish_run(shared: NDArray[np.int64]) -> bool:
    """Help with the run that is open, wait for its end and close it: then no thread reads its stages any more.

    False if a thread has failed.
    """
    _await_done(shared, _work(shared, 0))
    store_release(shared, OPENED, 0)
    await_others(shared)
    sound: bool = load_acquire(shared, FAILED) == 0
    return sound


@exact_kernel
def run_at_once(stages: NDArray[np.int64], shared: NDArray[np.int64], address: int, number: int) -> bool:
    """`open_run` and `finish_run`, where nobody has to be woken."""
    open_run(stages, shared, address, number)
    sound: bool = finish_run(shared)
    return sound


def help_run(shared: int, thread: int, _unused: int, _neither: int) -> int:
    """A stage for a post: work on the run that is open."""
    _work(array_at(shared, SHARED_WORDS, np.int64(0)), thread)
    return 0


@exact_kernel
def _work(shared: NDArray[np.int64], thread: int) -> int:
    """Take pieces until there are none; how many there were, all threads together."""
    stages = array_at(shared[STAGES], shared[NUM_STAGES] * NUM_FIELDS, np.int64(0))
    before = 0
    for i in range(shared[NUM_STAGES]):
        pieces, counter = stages[i * NUM_FIELDS + PIECES], COUNTERS + i * LINE
        if pieces > 0 and load_acquire(shared, counter) < pieces:
            if stages[i * NUM_FIELDS + WAITS] != 0:
                _await_done(shared, before)
            piece = add(shared, counter, 1)
            while piece < pieces:
                call_stage(stages[i * NUM_FIELDS + FUNCTION], stages[i * NUM_FIELDS + ARGUMENTS], piece, thread, 0)
                add(shared, DONE, 1)
                piece = add(shared, counter, 1)
        before += pieces
    return before


@exact_kernel
def _await_done(shared: NDArray[np.int64], pieces: int) -> None:
    turn = 0
    while load_acquire(shared, DONE) < pieces and load_acquire(shared, FAILED) == 0:
        wait(turn)
        turn += 1
