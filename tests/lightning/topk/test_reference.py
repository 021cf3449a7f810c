"""The total order of Top-K, score descending, then index ascending, with NaN, infinities and signed zeros."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csattn.lightning import top_k_reference
from csattn.lightning.topk.reference import indices_of, order_keys, orderable

NAN, INF = float("nan"), float("inf")
SCORES = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=True, allow_infinity=True), st.sampled_from([0.0, -0.0, 1.0, NAN, INF, -INF])
    ),
    min_size=1,
    max_size=40,
)


def rank(score: float) -> tuple[int, float]:
    """Return a sort key that defines the order of scores: NaN is below all others, and -0.0 equals 0.0."""
    return (0, 0.0) if np.isnan(score) else (1, score)


@given(SCORES)
def test_order_keys_sort_by_score_then_index(scores: list[float]) -> None:
    keys = order_keys(torch.tensor(scores), torch.arange(len(scores)))
    got = keys.sort(descending=True).indices.tolist()
    assert got == sorted(range(len(scores)), key=lambda i: (*(-part for part in rank(scores[i])), i))


@given(SCORES, st.integers(0, 2**31 - 1))
def test_order_keys_decode_to_their_indices(scores: list[float], first: int) -> None:
    indices = (first + torch.arange(len(scores))) % 2**31
    assert indices_of(order_keys(torch.tensor(scores), indices)).tolist() == indices.tolist()


def test_orderable_covers_all_floats() -> None:
    ascending = torch.tensor([NAN, -INF, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, INF])
    assert (orderable(ascending).long().diff() > 0).all()
    assert orderable(torch.tensor([-0.0, 0.0])).unique().numel() == 1
    payloads = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all() and orderable(payloads).unique().numel() == 1


def test_legality_depends_on_the_index_and_not_on_the_score() -> None:
    scores = torch.tensor([[-INF, NAN, -INF, 5.0, 9.0]] * 4)
    legal_len = torch.tensor([0, 2, 4, 5], dtype=torch.int32)
    got = top_k_reference(scores, 3, legal_len)
    assert got.tolist() == [[-1, -1, -1], [0, 1, -1], [3, 0, 2], [4, 3, 0]]
    assert got.dtype == torch.int32


@pytest.mark.parametrize("k", [1, 7, 8, 12])
def test_a_k_beyond_the_number_of_keys_is_padded(k: int) -> None:
    got = top_k_reference(torch.arange(7.0)[None], k, torch.tensor([7], dtype=torch.int32))
    assert got.tolist() == [([6, 5, 4, 3, 2, 1, 0] + [-1] * 5)[:k]]
