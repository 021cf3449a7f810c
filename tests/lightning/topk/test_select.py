"""The k best scores of every row are the definition's, in its order, for any scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import top_k, top_k_reference


def agree(scores: Tensor, k: int, legal_len: list[int] | None = None) -> None:
    """Require the definition's choice in both orders. `top_k` gets NaN in place of scores that are not legal."""
    rows, length = scores.shape
    legal = torch.tensor([length] * rows if legal_len is None else legal_len, dtype=torch.int32)
    poisoned = torch.where(torch.arange(length) < legal[:, None], scores, torch.nan)
    given_len = None if legal_len is None else legal
    got = top_k(poisoned, k, given_len)
    by_position = top_k(poisoned, k, given_len, order="position")
    want = top_k_reference(scores, k, legal)
    assert got.tolist() == want.tolist()
    for row, chosen in enumerate(want.tolist()):
        found = sorted(i for i in chosen if i >= 0)
        assert by_position[row].tolist() == found + [-1] * (k - len(found))


@pytest.mark.parametrize("k", [1, 7, 300])
@pytest.mark.parametrize("length", [1, 2, 63, 300, 1001])
def test_top_k_equals_the_definition(length: int, k: int) -> None:
    scores = torch.randn(5, length)
    agree(scores, k)
    agree(scores, k, [0, length, length // 2, 1, length - 1])


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1.0]


@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40), st.integers(1, 45), st.integers(0, 40))
def test_top_k_of_ties_zeros_infinities_and_nan_equals_the_definition(values: list[float], k: int, legal: int) -> None:
    agree(torch.tensor([values]), k, [min(legal, len(values))])


def test_top_k_without_rows_or_keys_is_padding() -> None:
    assert top_k(torch.zeros(0, 5), 3).shape == (0, 3)
    assert top_k(torch.zeros(2, 0), 3).tolist() == [[-1] * 3] * 2
    no_pages = torch.zeros(2, 0, dtype=torch.int32)
    assert top_k(torch.zeros(2, 0), 3, pages=no_pages, page_size=64).tolist() == [[-1] * 3] * 2


def test_top_k_takes_strided_rows(rng: np.random.Generator) -> None:
    wide = torch.from_numpy(rng.standard_normal((4, 100), dtype=np.float32))
    assert torch.equal(top_k(wide[:, 3:60], 9), top_k(wide[:, 3:60].contiguous(), 9))


def test_legal_lengths_outside_a_row_are_clamped() -> None:
    scores = torch.randn(2, 20)
    got = top_k(scores, 30, torch.tensor([-5, 99], dtype=torch.int32))
    assert (got[0] == -1).all()
    assert torch.equal(got[1:], top_k(scores[1:], 30))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"scores": torch.zeros(2, 8, dtype=torch.float16)}, ArrayError, "wanted float32"),
        ({"scores": torch.zeros(8)}, ArrayError, r"wanted \[rows, length\]"),
        ({"scores": [[1.0, 2.0]]}, ArrayError, "scores is a list; wanted a torch.Tensor"),
        ({"scores": torch.zeros(8, 2).T}, ArrayError, "wanted contiguous rows"),
        ({"scores": torch.zeros(1, 8).expand(2, 8)}, ArrayError, "do not overlap"),
        ({"k": 0}, ConfigError, "at least 1"),
        ({"k": True}, ConfigError, "whole number"),
        ({"order": "index"}, ConfigError, "'score' or 'position'"),
        ({"legal_len": torch.zeros(2, dtype=torch.int64)}, ArrayError, "legal_len is int64; wanted int32"),
        ({"legal_len": torch.zeros(3, dtype=torch.int32)}, ArrayError, r"legal_len has shape \[3\]; wanted \[2\]"),
        ({"out": torch.zeros(2, 5, dtype=torch.int32)}, ArrayError, r"out has shape \[2, 5\]; wanted \[2, 4\]"),
    ],
)
def test_invalid_arguments_of_top_k_are_refused_with_the_reason(
    change: dict[str, object], error: type[Exception], says: str
) -> None:
    arguments = {"scores": torch.zeros(2, 8), "k": 4} | change
    with pytest.raises(error, match=says):
        top_k(**arguments)  # type: ignore[arg-type]
