"""Selections of several tokens side by side, and what `check` finds wrong with one."""

import numpy as np
import pytest

from csattn.selection import Rest, Selection, stack_selections


def selection(kv_indices, **more) -> Selection:
    indices = np.array(kv_indices, np.int32)
    return Selection(indices, (indices >= 0).sum(1).astype(np.int32), **more)


def test_narrow_selections_are_padded_to_the_widest() -> None:
    narrow, wide = selection([[3], [-1]]), selection([[1, 4, 5], [2, -1, -1]])
    kv_indices, log_weights = stack_selections([narrow, wide])
    np.testing.assert_array_equal(kv_indices, [[[3, -1, -1], [-1, -1, -1]], [[1, 4, 5], [2, -1, -1]]])
    assert kv_indices.dtype == np.int32
    assert log_weights is None


def test_padding_weighs_nothing_more() -> None:
    narrow = selection([[3]], log_weights=np.array([[0.5]], np.float32))
    wide = selection([[1, 4]], log_weights=np.array([[1.5, 2.5]], np.float32))
    _, log_weights = stack_selections([narrow, wide])
    np.testing.assert_array_equal(log_weights, np.array([[[0.5, 0.0]], [[1.5, 2.5]]], np.float32))


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
def test_check_finds(wrong: Selection, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        wrong.check(kv_len=9)


def test_check_passes_what_is_right() -> None:
    rest = Rest(np.zeros((1, 2), np.float32), np.ones(1, np.float32))
    selection(ROWS, log_weights=np.array([[0.5, -3, 0]], np.float32), rest=rest).check(kv_len=9)
