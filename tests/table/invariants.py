"""Invariants of lists and their tails: `check` raises AssertionError if one is violated."""

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
    """Raise AssertionError if lists differ in length, or hold entries that a search must not see."""
    listed = np.unpackbits(table.listed.view(np.uint8), axis=-1, bitorder="little").astype(np.int64)
    held = table.scores[..., : table.list_len].astype(np.float32)
    assert not listed.reshape(*held.shape[:3], -1)[..., table.context_len :].any(), "a key is out of range"
    of_chunks = listed.sum(axis=-1)
    assert (of_chunks.sum(axis=-1) == table.list_len).all(), "a list has another length"
    assert (of_chunks.cumsum(axis=-1) - of_chunks == table.starts).all(), "a chunk's scores begin elsewhere"
    assert np.isfinite(table.scores).all(), "a score is NaN or infinite"
    assert not (np.signbit(held) & (held == 0)).any(), "a score is -0.0"
    assert (held.min(axis=-1) == table.least).all(), "the least score is another"


@check.register
def _(tail: ListTail) -> None:
    """Raise AssertionError if a list is not what insertion key by key gives."""
    for head, subspace, centroid in np.ndindex(*tail.num_inserted.shape):
        inserted = int(tail.num_inserted[head, subspace, centroid])
        assert 0 <= inserted <= min(tail.num_rows, tail._table.list_len), f"{tail!r} inserted too many keys"
        keys, scores = tail.entries(head, subspace, centroid)
        assert len(keys) == len(scores) == tail._table.list_len, f"{tail!r} has a list of another length"
        assert (np.diff(keys) > 0).all(), f"{tail!r} holds a key twice, or out of order"
        assert keys[-1] < tail._table.context_len + tail.num_rows, f"{tail!r} holds a key that is not there"
        assert scores.min() == tail._lowest[head, subspace, centroid], f"{tail!r} has lost a list's lowest score"
        own = tail.inserted_indices[head, subspace, centroid, :inserted]
        own_scores = tail.inserted_scores[head, subspace, centroid, :inserted]
        order = np.lexsort((own, -own_scores))
        assert (order == np.arange(inserted)).all(), f"{tail!r} holds inserted keys out of order"
