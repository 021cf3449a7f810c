"""What `check` finds wrong with a selection."""

import numpy as np
import pytest

from csattn.selection import Rest, Selection
from tests.selections import check_selection


def selection(kv_indices, **more) -> Selection:
    indices = np.array(kv_indices, np.int32)
    return Selection(indices, (indices >= 0).sum(1).astype(np.int32), **more)


ROWS = [[2, 5, -1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (selection([[5, 2, -1]]), "ascending"),
        (selection([[2, 9, -1]]), "outside"),
        (Selection(np.array(ROWS, np.int32), np.array([1], np.int32)), "after its valid_len"),
        (selection(ROWS, log_weights=np.zeros((1, 2), np.float32)), "no weight"),
        (selection(ROWS, log_weights=np.array([[0, np.inf, 0]], np.float32)), "not finite"),
        (selection(ROWS, log_weights=np.array([[0, 0, 1]], np.float32)), "padding"),
        (selection(ROWS, rest=Rest(np.full((1, 2), np.nan, np.float32), np.zeros(1, np.float32))), "not finite"),
        (selection(ROWS, rest=Rest(np.zeros((1, 2), np.float32), np.array([1.5], np.float32))), "outside"),
    ],
)
def test_check_detects_invalid_selections(wrong: Selection, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_selection(wrong, 9)


def test_check_accepts_a_valid_selection() -> None:
    rest = Rest(np.zeros((1, 2), np.float32), np.ones(1, np.float32))
    check_selection(selection(ROWS, log_weights=np.array([[0.5, -3, 0]], np.float32), rest=rest), 9)
