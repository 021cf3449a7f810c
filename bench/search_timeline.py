"""When each stage of a layer's search begins and ends, over all threads: each is swapped for one that takes notes."""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cfunc, types
from numpy.typing import NDArray

from csattn.search import LayerSearch, SearchPool
from csattn.search.atomics import add, array_at, call_stage, now_ns
from csattn.search.work import FIRST_STAGE, NUM_CALLS

STAGES = ("project", "weigh", "score", "guess", "copy", "choose", "attend", "join")
NOTE_WORDS, MAX_NOTES = 4, 1 << 14  # stage, job, begin, end; of one search
ROUNDS = 4


def measure_timeline(searches: Sequence[LayerSearch], num_threads: int) -> dict[str, Any]:
    """Medians over the searches, in us since a search was handed over: of each stage when the first piece begins and
    the last ends, how long threads were at it in all, and what share of their time they had no piece."""
    notes = np.zeros(NOTE_WORDS * (MAX_NOTES + 1), np.int64)
    whole_us, spans, busy_us = [], [], []
    with SearchPool(num_threads) as pool, _noted(searches, notes):
        for number, search in enumerate(ROUNDS * list(searches)):
            notes[0] = 0
            started = time.monotonic_ns()
            pool.start(search)
            pool.finish()
            ended = time.monotonic_ns()
            if number < len(searches):
                continue  # a first round for caches and pages
            taken = notes[NOTE_WORDS : NOTE_WORDS * (min(int(notes[0]), MAX_NOTES) + 1)].reshape(-1, NOTE_WORDS)
            whole_us.append((ended - started) / 1e3)
            spans.append([_span(taken[taken[:, 0] == stage], started) for stage in range(len(STAGES))])
            busy_us.append((taken[:, 3] - taken[:, 2]).sum() / 1e3)
    medians = np.median(spans, axis=0).round(1).tolist()
    whole = float(np.median(whole_us))
    return {
        "whole_us": round(whole, 1),
        "idle": round(1 - float(np.median(busy_us)) / (whole * num_threads), 3),
        "first_last_busy_us": dict(zip(STAGES, medians, strict=True)),
    }


def _span(notes: NDArray[np.int64], started: int) -> tuple[float, float, float]:
    begin, end = notes[:, 2], notes[:, 3]
    return (begin.min() - started) / 1e3, (end.max() - started) / 1e3, (end - begin).sum() / 1e3


@contextmanager
def _noted(searches: Sequence[LayerSearch], notes: NDArray[np.int64]) -> Iterator[None]:
    """Let all stages of the searches take notes: behind the first NOTE_WORDS, of which one counts them."""
    calls = [np.ctypeslib.as_array(_words(search.calls_address)) for search in searches]
    plain = [of_search.copy() for of_search in calls]
    noting = {}
    for stage in range(len(STAGES)):
        address = int(calls[0][FIRST_STAGE + stage])
        noting[address] = _noting_stage(stage, address, notes.ctypes.data)
    try:
        for of_search in calls:
            of_search[FIRST_STAGE:] = [noting[int(address)].address for address in of_search[FIRST_STAGE:]]
        yield
    finally:
        for of_search, addresses in zip(calls, plain, strict=True):
            of_search[:] = addresses


def _words(address: int) -> Any:
    return (ctypes.c_int64 * NUM_CALLS).from_address(address)


def _noting_stage(stage: int, target: int, notes_address: int) -> Any:
    """A stage that calls another. Compiled anew each time: it has addresses of this process in it."""

    @cfunc(types.int64(types.int64, types.int64, types.int64, types.int64), nopython=True)
    def note(search: int, scratch: int, job: int, piece: int) -> int:
        notes = array_at(notes_address, NOTE_WORDS * (MAX_NOTES + 1), np.int64(0))
        begin = now_ns()
        again: int = call_stage(target, search, scratch, job, piece)
        end = now_ns()
        at = NOTE_WORDS * (add(notes, 0, 1) % MAX_NOTES + 1)
        notes[at], notes[at + 1], notes[at + 2], notes[at + 3] = stage, job, begin, end
        return again

    return note
