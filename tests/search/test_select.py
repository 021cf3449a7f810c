"""The top_k of an array: exact, ordered by (worth descending, index ascending), whatever the distribution."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from csattn.search.select import SAMPLE, count_at_least, kth_largest, select_top_k
from csattn.search.worth import NOT_SCORED


def select(worth: NDArray[np.int32], top_k: int) -> NDArray[np.int32]:
    """The chosen indices; scratch memory and output are poisoned, and what lies behind the worth is tempting."""
    room = -(-len(worth) // 64) * 64 + 64
    padded = np.full(room, 2**31 - 1, np.int32)
    padded[: len(worth)] = worth
    scratch = np.full((2, room), -777, np.int32)
    chosen = np.full(top_k, -777, np.int32)
    valid = select_top_k(padded, len(worth), scratch[0], scratch[1], chosen)
    assert (chosen[valid:] == -1).all()
    return chosen[:valid]


def expected(worth: NDArray[np.int32], top_k: int) -> NDArray[np.int64]:
    order = np.argsort(-worth.astype(np.int64), kind="stable")
    order = order[worth[order] != NOT_SCORED]
    return np.sort(order[:top_k])


@given(st.lists(st.integers(-3, 3), max_size=200), st.integers(0, 220))
@settings(deadline=None)
def test_small_arrays_with_ties(values: list[int], top_k: int) -> None:
    worth = np.array(values, np.int32)
    worth[worth == -3] = NOT_SCORED
    np.testing.assert_array_equal(select(worth, top_k), expected(worth, top_k))


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "gaussian": lambda rng, n: rng.normal(0, 1e6, n),
    "full range": lambda rng, n: rng.integers(NOT_SCORED, 2**31, n),
    "all equal": lambda rng, n: np.full(n, 17),
    "two values": lambda rng, n: rng.integers(0, 2, n),
    "heavy ties": lambda rng, n: np.rint(rng.normal(0, 3, n)),
    "skewed": lambda rng, n: np.minimum(rng.pareto(0.3, n), 2e9),
    "few scored": lambda rng, n: np.where(rng.random(n) < 0.01, rng.integers(0, 99, n), NOT_SCORED),
    "none scored": lambda rng, n: np.full(n, NOT_SCORED),
    "rising": lambda rng, n: np.arange(n),
    "falling": lambda rng, n: np.arange(n)[::-1],
    "extremes": lambda rng, n: rng.choice([2**31 - 1, NOT_SCORED + 1, 0], n),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 2 * SAMPLE, 2 * SAMPLE + 1, 50_021])
def test_any_distribution(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    worth = DISTRIBUTIONS[name](rng, n).astype(np.int32)
    for top_k in {0, 1, n // 20, n // 2, n, n + 3}:
        np.testing.assert_array_equal(select(worth, top_k), expected(worth, top_k))


@pytest.mark.parametrize("low_part", [0.5, 0.9, 0.99])
def test_a_guess_that_was_too_high_is_lowered(low_part: float) -> None:
    """Only the sampled places hold large values: the sample promises far more than there is."""
    n = 100_000
    worth = np.random.default_rng(0).integers(0, 1000, n).astype(np.int32)
    stride = n // SAMPLE
    sampled = np.arange(SAMPLE) * stride + np.arange(SAMPLE) % stride
    worth[sampled[: int(SAMPLE * (1 - low_part))]] += 1_000_000
    for top_k in (10, 500, 5000, 60_000):
        np.testing.assert_array_equal(select(worth, top_k), expected(worth, top_k))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_counting_and_bisection(n: int) -> None:
    values = np.random.default_rng(n).integers(-50, 50, n).astype(np.int32)
    for threshold in (-51, -50, 0, 49, 50, 2**31 - 1, 2**31):
        assert count_at_least(values, n, threshold) == (values.astype(np.int64) >= threshold).sum()
    for k in range(1, n + 1):
        found = kth_largest(values, n, k, NOT_SCORED)
        kth = np.sort(values)[::-1][k - 1]
        assert (values >= found).sum() >= k, f"too few reach {found}"
        assert (values[values >= found] >= kth).all(), f"{found} lets in values below the {k}-th"
