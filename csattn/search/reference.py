"""The definition of a search, in plain numpy: slow, obviously right, and what every faster version must meet.

One search serves one token of one request in one layer. The query rows h * group_size ... (h + 1) * group_size - 1
share index head h. A row's kv index is its position in the request's KV: the context comes first, row t of the tail
has index context_len + t.
"""

import numpy as np
from numpy.typing import NDArray

from csattn.index import ListIndex
from csattn.selection import Selection
from csattn.sketch import reference as sketch
from csattn.sketch.index import SketchIndex
from csattn.table.lists import ListTable
from csattn.table.tail import ListTail

# Lower bound of a scored key's share in one query row's softmax: shares never underflow, and a scored key is never
# mistaken for an unscored one. 2**-216 is about e**-150, far below any weight that matters to attention.
LEAST_SHARE = 2.0**-216


def search(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: ListIndex | SketchIndex,
    tail: ListTail | None,  # a sketch has none
    top_k: int,
    sink_len: int,
    window_len: int,
    softmax_scale: float,
    out: Selection,  # kv_indices [num_heads, top_k]
) -> None:
    """Choose, per index head, the top_k rows of the context and the tail that this token should fetch.

    Rows that no list holds are chosen only if top_k rows or fewer may be chosen: then all are.
    """
    group_size = q.shape[0] // index.num_heads
    num_keys = index.context_len + (tail.num_rows if tail is not None else 0)
    eligible = np.ones(num_keys, bool)  # neither sink nor window: those are resident
    eligible[: min(sink_len, index.context_len)] = False
    eligible[max(0, index.context_len - window_len) : index.context_len] = False
    for head in range(index.num_heads):
        group = q[head * group_size : (head + 1) * group_size]
        if isinstance(index, SketchIndex):
            group_scores = sketch_group_scores(group, index, head, top_k, softmax_scale)
            scored = np.ones(num_keys, np.bool_)
        else:
            group_scores, scored = combine_group([score_keys(row, index, tail, head) for row in group], softmax_scale)
        candidates = np.flatnonzero(eligible & scored if top_k < eligible.sum() else eligible)
        chosen = top_k_of(group_scores[candidates], top_k)
        out.valid_len[head] = len(chosen)
        out.kv_indices[head] = -1
        out.kv_indices[head, : len(chosen)] = candidates[chosen]


def sketch_group_scores(
    group: NDArray[np.float32],  # [group_size, head_dim]
    index: SketchIndex,
    head: int,
    top_k: int,
    softmax_scale: float,
) -> NDArray[np.float64]:
    """Return each key's group score from the sketch [context_len]; marked keys come first if they are few enough."""
    _, exponent, scores = sketch.score_group(group, index, head, softmax_scale)
    marks = index.marked_rows(head) if index.uses_marks(top_k) else None
    return sketch.group_scores(scores, exponent, marks).astype(np.float64)


def score_keys(
    q: NDArray[np.float32], index: ListIndex, tail: ListTail | None, head: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return one query row's scores of all keys, and whether any list holds each key: both [num_keys]."""
    centroid_ids, weights = match_centroids(q, index, head)
    return list_scores(index.table, tail, head, centroid_ids, weights)


def match_centroids(
    q: NDArray[np.float32], index: ListIndex, head: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the nearest centroid of each subspace, and the subspace's weight: both [num_subspaces].

    Sums run in index order in float64, where products of float32 are exact. So every machine rounds alike, whether or
    not it fuses multiply and add or vectorises.
    """
    parts = q.reshape(index.num_subspaces, -1)
    centroid_ids = np.empty(index.num_subspaces, np.int64)
    weights = np.ones(index.num_subspaces)
    for b, part in enumerate(parts):
        centroid_ids[b] = np.argmax(_dot_in_order(part, index.codebooks[head, b]))  # the lowest id among equals
        if index.weigh_by_norm:
            weights[b] = np.sqrt(_dot_in_order(part, part[None])[0])
    return centroid_ids, weights


def list_scores(
    table: ListTable, tail: ListTail | None, head: int, centroid_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Reduce by key: sum each key's weighted scores in the chosen lists, in float32, in the order of the subspaces.

    Returns the sums, and whether any list holds each key: both [num_keys].
    """
    num_keys = table.context_len + (tail.num_rows if tail is not None else 0)
    sums = np.zeros(num_keys, np.float32)
    listed = np.zeros(num_keys, bool)
    for b, centroid in enumerate(centroid_ids):
        keys, scores = (table if tail is None else tail).entries(head, b, int(centroid))
        sums[keys] += np.float32(weights[b]) * scores.astype(np.float32)
        listed[keys] = True
    return sums.astype(np.float64), listed


def combine_group(
    rows: list[tuple[NDArray[np.float64], NDArray[np.bool_]]], softmax_scale: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return each key's group score, and whether it is scored: both [num_keys].

    The group score is the sum of the key's shares in each query row's softmax; of a single row, the score itself.
    """
    if len(rows) == 1:
        return rows[0]
    group_scores = np.zeros(len(rows[0][0]))
    for scores, scored in rows:
        if scored.any():
            logits = softmax_scale * scores[scored]
            shares = np.exp(logits - logits.max())
            group_scores[scored] += np.maximum(shares / shares.sum(), LEAST_SHARE)
    return group_scores, group_scores > 0


def top_k_of(group_scores: NDArray[np.float64], top_k: int) -> NDArray[np.int64]:
    """Return the positions of the top_k largest group scores, ascending; among equals the first win."""
    order = np.argsort(-group_scores, kind="stable")
    return np.sort(order[:top_k])


def _dot_in_order(x: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the dot product of x [n] with each of rows [r, n], summed in float64 in index order."""
    return np.add.accumulate(rows.astype(np.float64) * x.astype(np.float64), axis=1)[:, -1]
