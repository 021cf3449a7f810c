"""Whether the book-keeping of lists is right: `check` raises AssertionError where it is not."""

from functools import singledispatch
from typing import Any

import numpy as np

from csattn.table.lists import ListTable
from csattn.table.tail import ListTail


@singledispatch
def check(thing: Any) -> None:
    raise TypeError(f"nothing is known of what keeps {thing!r} right")


@check.register
def _(table: ListTable) -> None:
    """Raise AssertionError if a list is unordered, repeats a key, or holds what a search must not meet."""
    indices, scores = np.asarray(table.indices), np.asarray(table.scores).astype(np.float32)
    assert indices.shape == scores.shape, f"indices {indices.shape} and scores {scores.shape} differ in shape"
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < table.context_len), "a key is out of range"
    assert np.isfinite(scores).all(), "a score is NaN or infinite"
    assert not (np.signbit(scores) & (scores == 0)).any(), "a score is -0.0"
    falls = scores[..., 1:] < scores[..., :-1]
    ties_in_order = (scores[..., 1:] == scores[..., :-1]) & (indices[..., 1:] > indices[..., :-1])
    assert (falls | ties_in_order).all(), "a list is not ordered by (score descending, index ascending)"
    by_key = np.sort(indices, axis=-1)
    assert (by_key[..., 1:] != by_key[..., :-1]).all(), "a list holds a key twice"


@check.register
def _(tail: ListTail) -> None:
    """Raise AssertionError if a list is not what inserting key by key makes of it."""
    for head, subspace, centroid in np.ndindex(*tail.num_inserted.shape):
        inserted = int(tail.num_inserted[head, subspace, centroid])
        assert 0 <= inserted <= min(tail.num_rows, tail._table.list_len), f"{tail!r} inserted too many keys"
        indices, scores = tail.merged_list(head, subspace, centroid)
        assert len(np.unique(indices)) == tail._table.list_len, f"{tail!r} holds a key twice"
        assert indices.max() < tail._table.context_len + tail.num_rows, f"{tail!r} holds a key that is not there"
        assert scores[-1] == tail._lowest[head, subspace, centroid], f"{tail!r} has lost a list's lowest score"
        own = tail.inserted_indices[head, subspace, centroid, :inserted]
        own_scores = tail.inserted_scores[head, subspace, centroid, :inserted]
        order = np.lexsort((own, -own_scores))
        assert (order == np.arange(inserted)).all(), f"{tail!r} holds inserted keys out of order"
