"""How threads share a search: each runs `work` over the same records until no piece is left.

A job passes through the stages in `calls`. A stage is cut into pieces. A thread takes a piece by setting its bit in the
stage's word; whoever finishes the last piece also runs the function that ends the stage, and marks the stage done. All
threads walk through the stages in the same order, and wait only before they take a piece, for stages earlier in that
order. They finish a piece without waiting, so that some thread can always make progress, however many there are.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at, call_stage
from csattn.cpu.atomics import add, load_acquire, set_bits, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import trailing_zeros
from csattn.cpu.posts import FAILED, LINE, NUM_POST_WORDS, OPENED, await_others
from csattn.cpu.waiting import wait
from csattn.search.plan import MAX_JOBS, cut_pieces, scratch_at, search_at

# `calls` of a search: addresses of its two records, then of two functions of each stage: one for a piece, and one for
# the job when all pieces are done
SEARCH_RECORD, SCRATCH_RECORD, FIRST_STAGE = 0, 1, 2
MAX_STAGES = 4
NUM_CALLS = FIRST_STAGE + 2 * MAX_STAGES

# progress of a search: a cache line for each stage of each job
MATCH, SCORE = 0, 1  # the first stages; the later ones have a piece for each range
TAKEN, FINISHED, DONE = 0, 1, 2  # words of a line: bits of the pieces taken, number finished, whether the stage is done
PROGRESS_WORDS = MAX_STAGES * MAX_JOBS * LINE


@exact_kernel
def begin(
    calls: NDArray[np.int64],  # [NUM_CALLS] of the workspace, which threads read
    wanted: NDArray[np.int64],  # [NUM_CALLS] of the search to open, copied to `calls` except for the scratch record
    progress: NDArray[np.int64],  # [PROGRESS_WORDS]
    control: NDArray[np.int64],  # [NUM_POST_WORDS]
    first_job: int,
    num_jobs: int,  # at most MAX_JOBS
    number: int,  # neither 0 nor the previous search's
) -> None:
    """Open the jobs [first_job, first_job + num_jobs) of a search to the threads."""
    await_others(control)
    for i in range(NUM_CALLS):
        if i != SCRATCH_RECORD:
            calls[i] = wanted[i]
    search = search_at(calls[SEARCH_RECORD])
    cut_pieces(search)
    search.first_job = first_job
    search.num_jobs = num_jobs
    for stage in range(search.num_stages):
        line = _line(stage, 0)
        for word in range(line, line + num_jobs * LINE):
            progress[word] = 0
    store_release(control, OPENED, number)


@exact_kernel
def finish(calls: NDArray[np.int64], progress: NDArray[np.int64], control: NDArray[np.int64], num_jobs: int) -> bool:
    """Help with the search, wait for its end and close it; return False if a thread has failed."""
    work(calls, progress, control, 0)
    succeeded, last_stage = True, search_at(calls[SEARCH_RECORD]).num_stages - 1
    for job in range(num_jobs):
        succeeded = succeeded and _await(progress, control, _line(last_stage, job))
    store_release(control, OPENED, 0)
    return succeeded


def help_search(argument: int, thread: int, _unused: int, _neither: int) -> int:
    """Stage of a `Post`: help with the search. argument: address of the addresses of `calls`, `progress`, `control`."""
    at = array_at(argument, 3, np.int64(0))
    progress, control = array_at(at[1], PROGRESS_WORDS, np.int64(0)), array_at(at[2], NUM_POST_WORDS, np.int64(0))
    work(array_at(at[0], NUM_CALLS, np.int64(0)), progress, control, thread)
    return 0


@exact_kernel
def work(
    calls: NDArray[np.int64],
    progress: NDArray[np.int64],
    control: NDArray[np.int64],
    thread: int,  # below num_threads: decides where it begins to look for pieces, for the sake of its caches
) -> None:
    """Take and run pieces of the search until none is left."""
    search, scratch = search_at(calls[SEARCH_RECORD]), scratch_at(calls[SCRATCH_RECORD])
    num_jobs, num_slots, last_stage = search.num_jobs, scratch.num_slots, search.num_stages - 1
    first = thread * num_jobs // scratch.num_threads
    for job in range(first, first + num_jobs):
        _stage(calls, progress, MATCH, job % num_jobs, thread)
    # A stage of a job comes `lag` jobs after the stage before it: until then all threads have other pieces, and nobody
    # waits for a stage's last piece. The stage that frees a slot must come before the scores of the slot's next job.
    lag = min(-(-scratch.num_threads // _num_pieces(calls, SCORE)), (num_slots - 1) // (last_stage - SCORE))
    for step in range(num_jobs + lag * (last_stage - SCORE)):
        for stage in range(SCORE, last_stage + 1):
            job = step - lag * (stage - SCORE)
            if job < 0 or job >= num_jobs or not _any_left(calls, progress, stage, job):
                continue
            succeeded = _await(progress, control, _line(stage - 1, job))
            if stage == SCORE and job >= num_slots:  # until the slot's previous job is done with it
                succeeded = succeeded and _await(progress, control, _line(last_stage, job - num_slots))
            if not succeeded:
                return
            _stage(calls, progress, stage, job, thread)


@exact_kernel
def _stage(calls: NDArray[np.int64], progress: NDArray[np.int64], stage: int, job: int, thread: int) -> None:
    """Take and run pieces of a job's stage while any are left, beginning with the thread's own."""
    line, pieces = _line(stage, job), _num_pieces(calls, stage)
    search, scratch = calls[SEARCH_RECORD], calls[SCRATCH_RECORD]
    num_threads = scratch_at(scratch).num_threads
    piece = _take(progress, line, pieces, thread * pieces // num_threads)
    while piece >= 0:
        call_stage(calls[FIRST_STAGE + 2 * stage], search, scratch, job, piece)
        if add(progress, line + FINISHED, 1) == pieces - 1:
            while call_stage(calls[FIRST_STAGE + 1 + 2 * stage], search, scratch, job, 0) != 0:
                for again in range(pieces):
                    call_stage(calls[FIRST_STAGE + 2 * stage], search, scratch, job, again)
            store_release(progress, line + DONE, 1)
        piece = _take(progress, line, pieces, piece)


@exact_kernel
def _num_pieces(calls: NDArray[np.int64], stage: int) -> int:
    search = search_at(calls[SEARCH_RECORD])
    pieces: int = search.num_ranges
    if stage == MATCH:
        pieces = search.match_pieces
    elif stage == SCORE:
        pieces = search.score_pieces
    return pieces


@exact_kernel
def _line(stage: int, job: int) -> int:
    """Return where the words of a job's stage begin in `progress`."""
    return (stage * MAX_JOBS + job) * LINE


@exact_kernel
def _any_left(calls: NDArray[np.int64], progress: NDArray[np.int64], stage: int, job: int) -> bool:
    any_left: bool = _free(progress, _line(stage, job), _num_pieces(calls, stage)) != np.uint64(0)
    return any_left


@exact_kernel
def _free(progress: NDArray[np.int64], line: int, pieces: int) -> Any:
    """Return a bit for each piece that nobody has taken."""
    all_pieces = ~np.uint64(0) >> np.uint64(64 - pieces)
    return ~np.uint64(load_acquire(progress, line + TAKEN)) & all_pieces


@exact_kernel
def _take(progress: NDArray[np.int64], line: int, pieces: int, preferred: int) -> np.int64:
    """Take the first free piece from the preferred one on, or else from the start; -1: none is free."""
    while True:
        free = _free(progress, line, pieces)
        if free == np.uint64(0):
            return np.int64(-1)
        later = free >> np.uint64(preferred) << np.uint64(preferred)
        piece = trailing_zeros(later if later != np.uint64(0) else free)
        bit = np.uint64(1) << piece
        if np.uint64(set_bits(progress, line + TAKEN, np.int64(bit))) & bit == np.uint64(0):
            return np.int64(piece)


@exact_kernel
def _await(progress: NDArray[np.int64], control: NDArray[np.int64], line: int) -> bool:
    """Wait until a stage is done; return False if a thread has failed, after which it may never be."""
    turn = 0
    while load_acquire(progress, line + DONE) == 0:
        if load_acquire(control, FAILED) != 0:
            return False
        wait(turn)
        turn += 1
    return True
