"""A series of searches, each started as soon as its query arrives, without Python in between."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.atomics import load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.waiting import wait
from csattn.search.plan import MAX_JOBS
from csattn.search.run import LayerSearch
from csattn.search.work import NUM_CALLS, begin, finish

DONE, GIVEN_UP, FAILED = 0, 1, 2  # how a series ends


class SearchSeries:
    """Searches in the order in which their queries arrive, without tails, all over the same kind of index.

    A flag is the address of an int64 word and a value, relative to the `since` of a run: it is up once the word has
    reached the value. A device or another process may write the word. A search whose last choice flag is already up
    was made elsewhere and is skipped.
    """

    def __init__(
        self,
        searches: Sequence[LayerSearch],
        query_flags: Sequence[tuple[int, int]],  # address and value: up when the query is there
        # address, value and number of neighbouring words: raised when the choice is there
        choice_flags: Sequence[tuple[int, int, int]],
    ) -> None:
        assert len(query_flags) == len(choice_flags) == len(searches)
        assert all(search.tail is None for search in searches), "searches of a series have no tails"
        self.searches = searches
        # arguments of `SearchWorkspace.prepare`, large enough for all
        self.room = tuple(max(sizes) for sizes in zip(*(search.room for search in searches), strict=True))
        self.query_flags = np.array(query_flags, np.int64).reshape(-1, 2)
        self.choice_flags = np.array(choice_flags, np.int64).reshape(-1, 3)
        self.calls = np.array([search.calls_address for search in searches], np.int64)  # see `work`
        self.num_jobs = np.array([search.num_jobs for search in searches], np.int64)


@exact_kernel
def run_series(
    calls: NDArray[np.int64],  # of the workspace
    progress: NDArray[np.int64],
    control: NDArray[np.int64],
    wanted: NDArray[np.int64],  # the fields of a SearchSeries
    num_jobs: NDArray[np.int64],
    query_flags: NDArray[np.int64],
    choice_flags: NDArray[np.int64],
    since: int,  # what the flags' values are relative to
    give_up: NDArray[np.int64],
    number: int,  # of the search before this series: the next number is used first
) -> tuple[int, int]:
    """Run the searches in their order; return DONE, GIVEN_UP or FAILED, and the last number that was used."""
    for i in range(len(wanted)):
        num_chosen, value = choice_flags[i, 2], choice_flags[i, 1] + since
        chosen = array_at(choice_flags[i, 0], num_chosen, np.int64(0))
        if load_acquire(chosen, num_chosen - 1) >= value:
            continue
        if not await_flag(query_flags[i, 0], query_flags[i, 1] + since, give_up):
            return GIVEN_UP, number
        of_search = array_at(wanted[i], NUM_CALLS, np.int64(0))
        for first_job in range(0, num_jobs[i], MAX_JOBS):
            number += 1
            num_open = min(MAX_JOBS, num_jobs[i] - first_job)
            begin(calls, of_search, progress, control, first_job, num_open, number)
            if not finish(calls, progress, control, num_open):
                return FAILED, number
        for head in range(num_chosen):
            store_release(chosen, head, value)
    return DONE, number


@exact_kernel
def await_flag(address: int, value: int, give_up: NDArray[np.int64]) -> bool:
    """Wait until the word at the address has reached the value; return False if `give_up` [1] is set before."""
    flag, turn = array_at(address, 1, np.int64(0)), 0
    while load_acquire(flag, 0) < value:
        if load_acquire(give_up, 0) != 0:
            return False
        wait(turn)
        turn += 1
    return True
