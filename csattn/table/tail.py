"""The streaming update: keys that leave a request's window join the lists of that request.

The shared table is never written. A `ListTail` holds what one request adds to it in one layer: row t of the tail is key
context_len + t. It is not safe to append while a search reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import load_float
from csattn.cpu.jit import exact_kernel, readonly
from csattn.cpu.lanes import mask_at_least, trailing_zeros
from csattn.cpu.simd import LANES, F32x16, U16x16, fill, floats_of_halves, load
from csattn.table.lists import LARGEST_SCORE

if TYPE_CHECKING:
    from csattn.index import ListIndex

# the next entries of a list to leave, found in one scan; and entries that are sampled to guess how high it has to reach
FOUND_AT_ONCE, SAMPLE = 32, 64


class ListTail:
    """Tracks which entries of the shared lists still count, and which appended keys have replaced the others.

    Lists keep their length: a new key enters a list whose lowest score it beats, and the lowest entry leaves; on ties,
    that of the last key. List (h, b, j) consists of the remaining shared entries and of num_inserted[h, b, j] inserted
    ones. The boundary of the remaining ones is the lowest that stays: see `kept_least`. The shared entries that leave
    next are found FOUND_AT_ONCE at a time.

    All arrays are [num_index_heads, num_subspaces, num_centroids, ...].
    """

    def __init__(self, index: ListIndex) -> None:
        self._index = index
        self._table = index.table
        lists = index.codebooks.shape[:3]
        self.num_rows = 0
        self.num_inserted: NDArray[np.int32] = np.zeros(lists, np.int32)  # inserted keys in each list
        # [..., capacity], in descending order of scores, on ties of keys ascending; scores are float16 values
        self.inserted_indices: NDArray[np.int32] = np.full((*lists, 16), -1, np.int32)
        self.inserted_scores: NDArray[np.float32] = np.zeros((*lists, 16), np.float32)
        # the score and the position in the list of the lowest shared entry that counts; other entries with that score
        # count if their position is lower. If nothing is inserted, all count.
        self.kept_least: NDArray[np.float32] = self._table.least.astype(np.float32)
        self.kept_position: NDArray[np.int32] = np.full(lists, self._table.list_len, np.int32)
        self._lowest: NDArray[np.float32] = self.kept_least.copy()  # what a new key must beat
        # [..., FOUND_AT_ONCE]: scores and positions of shared entries in the order in which they leave; how many were
        # found, and how many shared entries left before these
        self._leaving_scores: NDArray[np.float32] = np.empty((*lists, FOUND_AT_ONCE), np.float32)
        self._leaving_places: NDArray[np.int32] = np.empty((*lists, FOUND_AT_ONCE), np.int32)
        self._num_found: NDArray[np.int32] = np.zeros(lists, np.int32)
        self._left_before: NDArray[np.int32] = np.zeros(lists, np.int32)

    def append(self, k: NDArray[np.float32]) -> None:
        """Try to insert one key into every list: k [num_kv_heads, head_dim], as in the KV cache."""
        if self.num_inserted.max(initial=0) == self.inserted_indices.shape[-1]:
            self._grow()
        # lists hold float16; adding 0 turns -0.0, which no list may hold, into 0.0
        held = score_key(k, self._index).clip(-LARGEST_SCORE, LARGEST_SCORE).astype(np.float16)
        scores = held.astype(np.float32) + np.float32(0)
        table, num_lists = self._table, scores.size
        _insert_scores(
            scores.reshape(-1),
            table.context_len + self.num_rows,
            readonly(table.scores.view(np.int16).reshape(num_lists, -1)),
            table.list_len,
            self.num_inserted.reshape(-1),
            self.inserted_indices.reshape(num_lists, -1),
            self.inserted_scores.reshape(num_lists, -1),
            self._lowest.reshape(-1),
            self.kept_least.reshape(-1),
            self.kept_position.reshape(-1),
            self._leaving_scores.reshape(num_lists, -1),
            self._leaving_places.reshape(num_lists, -1),
            self._num_found.reshape(-1),
            self._left_before.reshape(-1),
        )
        self.num_rows += 1

    def entries(self, head: int, subspace: int, centroid: int) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """Return list (head, subspace, centroid), updated: its keys, ascending, and their scores, both [list_len]."""
        where = head, subspace, centroid
        keys, scores = self._table.entries(*where)
        inserted, least, place = self.num_inserted[where], self.kept_least[where], self.kept_position[where]
        kept = (scores > least) | ((scores == least) & (np.arange(len(scores)) <= place))
        own_keys, own_scores = (of[where][:inserted] for of in (self.inserted_indices, self.inserted_scores))
        order = np.argsort(own_keys)
        own_scores = own_scores[order].astype(np.float16)
        return np.concatenate([keys[kept], own_keys[order]]), np.concatenate([scores[kept], own_scores])

    def _grow(self) -> None:
        indices, scores = self.inserted_indices, self.inserted_scores
        self.inserted_indices = np.concatenate([indices, np.full_like(indices, -1)], axis=-1)
        self.inserted_scores = np.concatenate([scores, np.zeros_like(scores)], axis=-1)

    def __repr__(self) -> str:
        room = self.inserted_indices.shape[-1]
        num_bytes = sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))
        inserted = int(self.num_inserted.sum())
        return f"<ListTail {self.num_rows} rows, {inserted} insertions, room for {room} a list, {num_bytes} bytes>"


def score_key(k: NDArray[np.float32], index: ListIndex) -> NDArray[np.float32]:
    """Return the scores [num_index_heads, num_subspaces, num_centroids] of one new key k [num_kv_heads, head_dim]."""
    head_dim = index.key_mean.shape[1]
    assert k.ndim == 2 and k.shape[1] == head_dim, f"k has shape {k.shape}, wanted [num_kv_heads, {head_dim}]"
    assert index.num_heads % k.shape[0] == 0, f"{k.shape[0]} KV heads do not divide {index.num_heads} index heads"
    scores = np.empty(index.codebooks.shape[:3], np.float32)
    _score_key(
        readonly(np.ascontiguousarray(k, np.float32)), readonly(index.key_mean), readonly(index.codebooks), scores
    )
    return scores


@exact_kernel
def _score_key(
    k: NDArray[np.float32],  # [num_kv_heads, head_dim]
    key_mean: NDArray[np.float32],
    codebooks: NDArray[np.float32],
    scores: NDArray[np.float32],  # [num_index_heads, num_subspaces, num_centroids], written
) -> None:
    num_heads, num_subspaces, num_centroids, subspace_dim = codebooks.shape
    head_dim = key_mean.shape[1]
    centred = np.empty(head_dim, np.float64)
    for head in range(num_heads):
        kv_head = head * k.shape[0] // num_heads
        for i in range(head_dim):
            centred[i] = np.float64(k[kv_head, i]) - np.float64(key_mean[head, i])
        for b in range(num_subspaces):
            for j in range(num_centroids):
                total = 0.0
                for d in range(subspace_dim):
                    total += centred[b * subspace_dim + d] * codebooks[head, b, j, d]
                scores[head, b, j] = total


@exact_kernel
def _insert_scores(
    scores: NDArray[np.float32],  # [num_lists], of the new key; all others are arrays of `ListTail`, one row a list
    kv_index: int,
    shared_scores: NDArray[np.int16],  # float16 bits
    list_len: int,
    num_inserted: NDArray[np.int32],
    inserted_indices: NDArray[np.int32],
    inserted_scores: NDArray[np.float32],
    lowest: NDArray[np.float32],
    kept_least: NDArray[np.float32],
    kept_position: NDArray[np.int32],
    leaving_scores: NDArray[np.float32],
    leaving_places: NDArray[np.int32],
    num_found: NDArray[np.int32],
    left_before: NDArray[np.int32],
) -> None:
    """Insert the key into every list whose lowest score it beats, and remove that entry. Capacity must suffice."""
    for i in range(len(scores)):
        score = scores[i]
        if not score > lowest[i]:
            continue
        inserted, own, own_indices = num_inserted[i], inserted_scores[i], inserted_indices[i]
        # on equal scores the inserted key has the higher index, so it leaves
        own_leaves = inserted > 0 and own[inserted - 1] == lowest[i]
        if own_leaves:
            inserted -= 1
        at = inserted
        while at > 0 and own[at - 1] < score:
            own[at] = own[at - 1]
            own_indices[at] = own_indices[at - 1]
            at -= 1
        own[at] = score
        own_indices[at] = kv_index
        inserted += 1
        num_inserted[i] = inserted
        if not own_leaves and inserted < list_len:
            found, before, least, place = num_found[i], left_before[i], kept_least[i], kept_position[i]
            while inserted - before >= found:
                if found > 0:
                    least, place = leaving_scores[i, found - 1], leaving_places[i, found - 1]
                before += found
                leaving = leaving_scores[i], leaving_places[i]
                found = _find_leaving(shared_scores[i], list_len, least, place, list_len - before, *leaving)
            num_found[i], left_before[i] = found, before
            kept_least[i] = leaving_scores[i, inserted - before]
            kept_position[i] = leaving_places[i, inserted - before]
        elif inserted == list_len:
            kept_least[i] = np.inf
        lowest[i] = min(own[inserted - 1], kept_least[i])


@exact_kernel
def _find_leaving(
    shared: NDArray[np.int16],
    list_len: int,
    least: np.float32,
    place: int,
    num_left: int,
    scores: NDArray[np.float32],  # [FOUND_AT_ONCE], written
    places: NDArray[np.int32],  # [FOUND_AT_ONCE], written
) -> int:
    """Find the next shared entries to leave, in that order; return how many: 1 to FOUND_AT_ONCE.

    Candidates are the num_left entries above `least`, or equal to it at a position below `place`. A sample of the list
    estimates up to which score twice FOUND_AT_ONCE candidates lie, so that few entries have to be sorted.
    """
    above, counted = 0.0, 1
    for candidate in range(0, list_len, max(1, list_len // SAMPLE)):
        score = load_float(shared, candidate)
        if score > least:
            above += np.float64(score) - np.float64(least)
            counted += 1
    found, highest = 0, np.float32(least + 2 * len(scores) * above / counted / num_left)
    while found == 0:
        found = _lowest_up_to(shared, list_len, least, place, highest, scores, places)
        highest = np.float32(np.inf)
    return found


@exact_kernel
def _lowest_up_to(
    shared: NDArray[np.int16],
    list_len: int,
    least: np.float32,
    place: int,
    highest: np.float32,
    scores: NDArray[np.float32],
    places: NDArray[np.int32],
) -> int:
    """Do the scan of `_find_leaving` for scores up to `highest`. Most vectors of entries have none and are skipped."""
    found = 0
    for first in range(0, list_len, LANES):
        block = floats_of_halves(load(U16x16, shared, first))
        bits = mask_at_least(block, fill(F32x16, least)) & mask_at_least(fill(F32x16, highest), block)
        while bits != np.uint64(0):
            candidate = first + np.int64(trailing_zeros(bits))
            bits &= bits - np.uint64(1)
            score = load_float(shared, candidate)
            if candidate >= list_len or (score == least and candidate >= place):
                continue
            if found == len(scores):
                if score > scores[found - 1]:
                    continue
                found -= 1
            at = found
            while at > 0 and scores[at - 1] >= score:
                scores[at], places[at] = scores[at - 1], places[at - 1]
                at -= 1
            scores[at], places[at] = score, candidate
            found += 1
        if found == len(scores):
            highest = scores[found - 1]
    return found
