"""The streaming update: keys that leave a request's window join the index of that request.

The shared table is never written. A tail holds what the request adds to it: row t of the tail is key
context_len + t. A tail belongs to one request and one layer; it is not safe to append while a search reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.floats import load_float
from csattn.cpu.jit import exact_kernel, readonly
from csattn.table.lists import LARGEST_SCORE

if TYPE_CHECKING:
    from csattn.index import LayerIndex


class ListTail:
    """Which entries of the shared lists still count, and the appended keys that took the others' places.

    Lists keep their length: a new key enters one whose lowest score it beats, and the lowest entry leaves. List
    (h, b, j) is now the first list_len - num_inserted[h, b, j] entries of the shared list merged with that many
    inserted ones.
    """

    def __init__(self, index: LayerIndex) -> None:
        self._index = index
        self._table = index.table
        lists = index.codebooks.shape[:3]
        self.num_rows = 0
        # appended keys in each list: [num_index_heads, num_subspaces, num_centroids]
        self.num_inserted: NDArray[np.int32] = np.zeros(lists, np.int32)
        # [num_index_heads, num_subspaces, num_centroids, capacity], ordered like the lists; scores are float16 values
        self.inserted_indices: NDArray[np.int32] = np.full((*lists, 16), -1, np.int32)
        self.inserted_scores: NDArray[np.float32] = np.zeros((*lists, 16), np.float32)
        # [num_index_heads, num_subspaces, num_centroids]: the score that a new key must beat
        self._lowest: NDArray[np.float32] = self._table.scores[..., -1].astype(np.float32)

    def append(self, k: NDArray[np.float32]) -> None:
        """Try to insert one key into every list: k [num_kv_heads, head_dim], as it lies in the KV cache."""
        if self.num_inserted.max(initial=0) == self.inserted_indices.shape[-1]:
            self._grow()
        # float16 is what the lists hold; adding 0 turns -0.0, which no list may hold, into 0.0
        held = score_key(k, self._index).clip(-LARGEST_SCORE, LARGEST_SCORE).astype(np.float16)
        scores = held.astype(np.float32) + np.float32(0)
        _insert_scores(
            scores,
            self._table.context_len + self.num_rows,
            readonly(self._table.scores.view(np.int16)),
            self.num_inserted,
            self.inserted_indices,
            self.inserted_scores,
            self._lowest,
        )
        self.num_rows += 1

    def merged_list(self, head: int, subspace: int, centroid: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """List (head, subspace, centroid) as it is now: indices and scores [list_len], in the lists' order."""
        where = head, subspace, centroid
        inserted = int(self.num_inserted[where])
        kept = self._table.list_len - inserted
        indices = np.concatenate([self._table.indices[where][:kept], self.inserted_indices[where][:inserted]])
        new_scores = self.inserted_scores[where][:inserted].astype(np.float16)
        scores = np.concatenate([self._table.scores[where][:kept], new_scores])
        order = np.lexsort((indices, -scores.astype(np.float32)))
        return indices[order], scores[order]

    def _grow(self) -> None:
        indices, scores = self.inserted_indices, self.inserted_scores
        self.inserted_indices = np.concatenate([indices, np.full_like(indices, -1)], axis=-1)
        self.inserted_scores = np.concatenate([scores, np.zeros_like(scores)], axis=-1)

    def __repr__(self) -> str:
        room = self.inserted_indices.shape[-1]
        num_bytes = self.inserted_indices.nbytes + self.inserted_scores.nbytes
        inserted = int(self.num_inserted.sum())
        return f"<ListTail {self.num_rows} rows, {inserted} insertions, room for {room} a list, {num_bytes} bytes>"


def score_key(k: NDArray[np.float32], index: LayerIndex) -> NDArray[np.float32]:
    """Scores [num_index_heads, num_subspaces, num_centroids] of one new key k [num_kv_heads, head_dim]."""
    head_dim = index.key_mean.shape[1]
    assert k.ndim == 2 and k.shape[1] == head_dim, f"k has shape {k.shape}, wanted [num_kv_heads, {head_dim}]"
    assert index.num_heads % k.shape[0] == 0, f"{k.shape[0]} KV heads do not divide {index.num_heads} index heads"
    scores = np.empty(index.codebooks.shape[:3], np.float32)
    _score_key(
        readonly(np.ascontiguousarray(k, np.float32)),
        readonly(index.key_mean),
        readonly(index.codebooks),
        scores,
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
    scores: NDArray[np.float32],  # [num_index_heads, num_subspaces, num_centroids] of the new key
    kv_index: int,
    shared_scores: NDArray[np.int16],  # float16 bits
    num_inserted: NDArray[np.int32],
    inserted_indices: NDArray[np.int32],
    inserted_scores: NDArray[np.float32],
    lowest: NDArray[np.float32],
) -> None:
    """Insert the key into every list whose lowest score it beats; that entry leaves. There must be room."""
    num_heads, num_subspaces, num_centroids = scores.shape
    list_len = shared_scores.shape[3]
    for head in range(num_heads):
        for b in range(num_subspaces):
            for j in range(num_centroids):
                score = scores[head, b, j]
                if not score > lowest[head, b, j]:
                    continue
                inserted = num_inserted[head, b, j]
                own = inserted_scores[head, b, j]
                own_indices = inserted_indices[head, b, j]
                # of equal scores the inserted key has the higher index, so it is the one that leaves
                if inserted > 0 and own[inserted - 1] == lowest[head, b, j]:
                    inserted -= 1
                at = inserted
                while at > 0 and own[at - 1] < score:
                    own[at] = own[at - 1]
                    own_indices[at] = own_indices[at - 1]
                    at -= 1
                own[at] = score
                own_indices[at] = kv_index
                inserted += 1
                num_inserted[head, b, j] = inserted
                kept = list_len - inserted
                remaining = own[inserted - 1]
                if kept > 0:
                    remaining = min(remaining, load_float(shared_scores[head, b, j], kept - 1))
                lowest[head, b, j] = remaining
