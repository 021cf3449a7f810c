"""Reduce by key: add each list's weighted scores in turn to those of a chunk of keys, which stays in the cache."""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import add_expanded, population
from csattn.cpu.simd import LANES, F32x16, U16x16, fill, floats_of_halves, load, store
from csattn.table.lists import CHUNK_KEYS, SCORE_UNIT

WORDS = CHUNK_KEYS // 64  # 64-bit words of a chunk's bits
WEIGHTED_ROOM = CHUNK_KEYS + 2 * SCORE_UNIT  # a chunk's scores, with padding: they are read and spread by whole vectors


@exact_kernel
def clear_scores(scores: NDArray[np.float32], start: int, num_keys: int) -> None:
    """Mark keys as in no list, by scores of -0.0.

    x + -0.0 is x, so the mark does not change a sum. A sum is -0.0 only if everything added to -0.0 was -0.0, and lists
    never add -0.0. So a key's bits are still those of -0.0 if and only if no list holds it.
    """
    mark = fill(F32x16, -0.0)
    for key in range(start, start + num_keys, LANES):
        store(scores, key, mark)


@exact_kernel
def write_weighted_scores(
    halves: NDArray[np.int16],  # float16 bits, read from the beginning of the first one's unit
    first: int,
    last: int,
    weight: float,
    weighted: NDArray[np.float32],  # [WEIGHTED_ROOM], written
) -> int:
    """Write weight * score, never -0.0, for scores first ... last - 1; return where the first is in `weighted`."""
    weights, begin = fill(F32x16, weight), first - first % SCORE_UNIT
    for at in range(begin, last, LANES):
        score = floats_of_halves(load(U16x16, halves, at))
        store(weighted, at - begin, weights * score + fill(F32x16, 0.0))
    return first - begin


@exact_kernel
def exclude_lower_scores(
    halves: NDArray[np.int16],
    first: int,
    last: int,
    least: np.float32,
    place: int,
    weighted: NDArray[np.float32],
    begin: int,
) -> None:
    """Let weighted scores add nothing, by setting them to -0.0, if the score is below `least`, or equal to it and after
    `place`."""
    for i in range(last - first):
        score = load_float(halves, first + i)
        if score < least or (score == least and first + i > place):
            weighted[begin + i] = np.float32(-0.0)


@exact_kernel
def add_chunk(
    scores: NDArray[np.float32],  # [.., CHUNK_KEYS, ..]: the chunk's begin at `start`
    start: int,
    listed: NDArray[np.uint64],  # a bit for each key; the chunk's words begin at `word`
    word: int,
    weighted: NDArray[np.float32],  # [WEIGHTED_ROOM]: of the listed keys in their order, from `at` on
    at: int,
) -> None:
    """Add the weighted scores to those of the listed keys of a chunk."""
    for number in range(word, word + WORDS):
        bits = listed[number]
        for _ in range(64 // LANES):
            of_lanes = bits & np.uint64(0xFFFF)
            store(scores, start, add_expanded(load(F32x16, scores, start), weighted, at, of_lanes))
            at += population(of_lanes)
            bits >>= np.uint64(LANES)
            start += LANES
