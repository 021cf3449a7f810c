"""Searches that follow one another, each begun as soon as its query is there, without Python in between."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.atomics import load_acquire, store_release
from csattn.cpu.jit import exact_kernel
from csattn.cpu.waiting import wait
from csattn.search.plan import MAX_JOBS
from csattn.search.run import LayerSearch
from csattn.search.work import NUM_CALLS, begin, finish

DONE, GIVEN_UP, UNSOUND = 0, 1, 2  # how a series ends


@dataclass(frozen=True, slots=True)
class SearchSeries:
    """Searches in the order in which their queries come, without tails, of one kind of index.

    A flag is the address of an int64 word, written by anybody, also a device or another process, and what it has at
    least when it is up, counted from what a run says. A search whose last choice flag is up already was made by
    somebody else and is left out.
    """

    searches: Sequence[LayerSearch]
    room: tuple[int, ...]  # what `SearchWorkspace.prepare` is told
    query_flags: NDArray[np.int64]  # [num_searches, 2]: up when the search's query is there
    choice_flags: NDArray[np.int64]  # [num_searches, 3]: so many neighbouring words, raised when its choice is there
    calls: NDArray[np.int64]  # [num_searches]: addresses of what the kernels are told
    num_jobs: NDArray[np.int64]  # [num_searches]


def make_series(
    searches: Sequence[LayerSearch],
    query_flags: Sequence[tuple[int, int]],  # address and value
    choice_flags: Sequence[tuple[int, int, int]],  # address, value and how many
) -> SearchSeries:
    assert len(query_flags) == len(choice_flags) == len(searches)
    assert all(search.tail is None for search in searches), "searches of a series have no tails"
    return SearchSeries(
        searches,
        tuple(max(sizes) for sizes in zip(*(search.room for search in searches), strict=True)),
        np.array(query_flags, np.int64).reshape(-1, 2),
        np.array(choice_flags, np.int64).reshape(-1, 3),
        np.array([search.calls_address for search in searches], np.int64),
        np.array([search.num_jobs for search in searches], np.int64),
    )


@exact_kernel
def run_series(
    calls: NDArray[np.int64],  # of the workspace
    progress: NDArray[np.int64],
    control: NDArray[np.int64],
    wanted: NDArray[np.int64],  # the fields of a SearchSeries
    num_jobs: NDArray[np.int64],
    query_flags: NDArray[np.int64],
    choice_flags: NDArray[np.int64],
    since: int,  # what flags count from
    give_up: NDArray[np.int64],
    number: int,  # of the first search: the others count on
) -> tuple[int, int]:
    """DONE, GIVEN_UP or UNSOUND, and the last number that was used."""
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
                return UNSOUND, number
        for head in range(num_chosen):
            store_release(chosen, head, value)
    return DONE, number


@exact_kernel
def await_flag(address: int, value: int, give_up: NDArray[np.int64]) -> bool:
    """Wait until the word at the address has at least that value; false if it is given up."""
    flag, turn = array_at(address, 1, np.int64(0)), 0
    while load_acquire(flag, 0) < value:
        if load_acquire(give_up, 0) != 0:
            return False
        wait(turn)
        turn += 1
    return True
