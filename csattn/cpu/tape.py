"""Work that is recorded once and run often: a list of stages that threads divide, without Python in between.

A stage is a function, the address of its arguments, and a number of pieces. A thread takes a piece by incrementing the
stage's counter. Pieces of a stage that waits are taken only after all pieces of earlier stages are done. A piece that
has been taken is worked on without waiting, so some thread can always go on, whatever the number of threads.
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
# Words that threads share after those of their post; then the stages' counters, each on its own cache line
DONE = NUM_POST_WORDS  # number of pieces that are done
STAGES = DONE + LINE  # address of the run's `stages`
NUM_STAGES = STAGES + 1
COUNTERS = STAGES + LINE
SHARED_WORDS = COUNTERS + MAX_STAGES * LINE


class Tape:
    """Stages in the order of execution. Keeps their arguments alive."""

    def __init__(self) -> None:
        self.functions: list[Stage] = []
        self._kept: list[NDArray[np.int64]] = []
        self._array = np.zeros((0, NUM_FIELDS), np.int64)
        self._num_compiled = 0

    def add(self, stage: Stage, arguments: NDArray[np.int64], num_pieces: int = 0, waits: bool = True) -> None:
        """Append a stage. num_pieces may be set before every run, through `pieces`."""
        assert arguments.dtype == np.int64 and arguments.flags.c_contiguous
        self.functions.append(stage)
        self._kept.append(arguments)
        fields = np.array([[0, arguments.ctypes.data, num_pieces, waits]], np.int64)
        self._array = np.concatenate([self._array, fields])

    @property
    def stages(self) -> NDArray[np.int64]:
        """[num_stages, NUM_FIELDS], with addresses: compiles functions that have not been."""
        for i in range(self._num_compiled, len(self.functions)):
            self._array[i, FUNCTION] = compiled_address(self.functions[i])
        self._num_compiled = len(self.functions)
        return self._array

    @property
    def pieces(self) -> NDArray[np.int64]:
        """[num_stages]: the number of pieces of each stage in the next run; may be written."""
        return self._array[:, PIECES]


@exact_kernel
def open_run(stages: NDArray[np.int64], shared: NDArray[np.int64], address: int, number: int) -> None:
    """Open a run of these stages, which are at that address, for threads to join."""
    for i in range(len(stages)):
        shared[COUNTERS + i * LINE] = 0
    shared[DONE], shared[STAGES], shared[NUM_STAGES] = 0, address, len(stages)
    store_release(shared, OPENED, number)


@exact_kernel
def finish_run(shared: NDArray[np.int64]) -> bool:
    """Help with the open run, wait for its end and close it; afterwards no thread reads its stages.

    Returns False if a thread has failed.
    """
    _await_done(shared, _work(shared, 0))
    store_release(shared, OPENED, 0)
    await_others(shared)
    succeeded: bool = load_acquire(shared, FAILED) == 0
    return succeeded


@exact_kernel
def run_at_once(stages: NDArray[np.int64], shared: NDArray[np.int64], address: int, number: int) -> bool:
    """`open_run` and `finish_run` in one call, if no thread has to be woken."""
    open_run(stages, shared, address, number)
    succeeded: bool = finish_run(shared)
    return succeeded


def help_run(shared: int, thread: int, _unused: int, _neither: int) -> int:
    """The stage of the tapes' post: work on the open run."""
    _work(array_at(shared, SHARED_WORDS, np.int64(0)), thread)
    return 0


@exact_kernel
def _work(shared: NDArray[np.int64], thread: int) -> int:
    """Take pieces until none are left; return the number of pieces of all stages."""
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
