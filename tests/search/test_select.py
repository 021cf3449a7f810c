"""Top-K of keys is exact, ordered by (group score descending, index ascending), for any distribution of scores."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from csattn.index import ListIndex
from csattn.search import SearchWorkspace, empty_token_selections
from csattn.search.group_scores import NOT_SCORED
from csattn.search.plan import RANGE_KEYS, SAMPLE
from csattn.search.select import count_at_least, kth_largest, take_best
from csattn.sketch import SketchIndex
from csattn.sketch.codes import pack_codes, pack_marks
from csattn.sketch.reference import LOG2_E, score_group
from csattn.table.lists import ListTable, lists_of
from tests.search.synthetic import search
from tests.selections import check_selection

LARGEST = 2047
SCALE = 1 / LOG2_E  # a product of 1 is one octave
# of a key's eight coordinates: weights 1, 16 and 127 + 127 + 2 = 256 of 4-bit digits, for any score from 0 to 4095
MULTIPLIERS = np.array([1, 16, 127, 127, 2, 0, 0, 0])


def take(group_scores: NDArray[np.int32], top_k: int, guess: int) -> NDArray[np.int32]:
    """Return the best keys whose score reaches `guess`. The output is poisoned; large values follow the copies' end."""
    copied = np.flatnonzero(group_scores >= guess).astype(np.int32)
    behind = np.full(32, 2**31 - 1, np.int32)
    chosen = np.full(top_k, -777, np.int32)
    copies = np.concatenate([copied, behind]), np.concatenate([group_scores[copied], behind])
    valid = take_best(*copies, len(copied), guess, chosen)
    assert (chosen[valid:] == -1).all()
    return chosen[:valid]


def search_one_head(index: ListIndex | SketchIndex, top_k: int) -> NDArray[np.int32]:
    """Return the rows that a search chooses for a single query of ones."""
    out = empty_token_selections(1, 1, top_k)[0]
    q = np.ones((1, index.key_mean.shape[-1]), np.float32)
    search(q, index, None, 0, 0, SCALE, SearchWorkspace(), out)
    check_selection(out, index.context_len)
    return out.kv_indices[0, : out.valid_len[0]]


def list_index(table: ListTable) -> ListIndex:
    """Return an index of one centroid over these lists."""
    one = np.ones((1, 1, 1), np.float32)
    return ListIndex(one[..., None], np.zeros((1, 1), np.float32), table, False)


def select(group_scores: NDArray[Any], top_k: int) -> NDArray[np.int32]:
    """Return the indices that a search chooses when its scores are group_scores + 1."""
    digits = [(group_scores + LARGEST + 1) // 16**i % 16 for i in (0, 1, 2, 2, 2)]
    codes = np.stack([*digits, *[np.zeros(len(group_scores))] * 3], axis=-1).astype(np.uint8)
    nothing = np.zeros((1, 1, 8), np.float32)
    index = SketchIndex(
        codes=pack_codes(codes[None], 1, 0),
        marks=pack_marks(np.zeros((1, len(group_scores)), np.bool_)),
        num_fine=1,
        segment_starts=np.zeros(1, np.int32),
        key_mean=nothing,
        query_transform=np.diag(MULTIPLIERS)[None, None].astype(np.float16),
        value_mean=nothing,
        value_transform=np.zeros((1, 1, 8, 8), np.float16),
        context_len=len(group_scores),
    )
    _, exponent, found = score_group(np.ones((1, 8), np.float32), index, 0, SCALE)
    assert exponent == 0 and (found == group_scores + 1).all()
    return search_one_head(index, top_k)


def scores(group_scores: NDArray[Any]) -> NDArray[np.int64]:
    """Clip group scores to the range that codes can add up to."""
    return np.clip(group_scores, -LARGEST, LARGEST).astype(np.int64)


def expected(group_scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
    order = np.argsort(-group_scores.astype(np.int64), kind="stable")
    order = order[group_scores[order] != NOT_SCORED]
    return np.sort(order[:top_k])


@given(st.lists(st.integers(-3, 3), max_size=200), st.integers(0, 220), st.integers(-3, 3))
@settings(deadline=None)
def test_take_best_is_exact_with_ties(values: list[int], top_k: int, guess: int) -> None:
    group_scores = np.array(values, np.int32)
    reaching = np.where(group_scores >= guess, group_scores, NOT_SCORED)
    np.testing.assert_array_equal(take(group_scores, top_k, guess), expected(reaching, top_k))


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "gaussian": lambda rng, n: rng.normal(0, 500, n),
    "full range": lambda rng, n: rng.integers(-LARGEST, LARGEST, n),
    "all equal": lambda rng, n: np.full(n, 17),
    "two values": lambda rng, n: rng.integers(0, 2, n),
    "heavy ties": lambda rng, n: np.rint(rng.normal(0, 3, n)),
    "skewed": lambda rng, n: np.minimum(rng.pareto(0.3, n), LARGEST),
    "rising": lambda rng, n: np.arange(n) // 20,
    "falling": lambda rng, n: np.arange(n)[::-1] // 20,
    "extremes": lambda rng, n: rng.choice([LARGEST, -LARGEST, 0], n),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 2 * SAMPLE, 2 * SAMPLE + 1, RANGE_KEYS, 50_021])
def test_top_k_is_exact_for_any_distribution_of_scores(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    group_scores = scores(np.rint(DISTRIBUTIONS[name](rng, n)))
    for top_k in {0, 1, n // 20, n // 2, n, n + 3}:
        np.testing.assert_array_equal(select(group_scores, top_k), expected(group_scores, top_k))


@pytest.mark.parametrize("n", [100, 2 * SAMPLE, 50_021])
@pytest.mark.parametrize("listed", [1, 0.01, 0.6])
def test_keys_that_no_list_holds_are_chosen_only_if_all_are(n: int, listed: float) -> None:
    rng = np.random.default_rng(n)
    scores = np.where(rng.random(n) < listed, rng.normal(0, 3, n).astype(np.float16) + np.float16(0), -np.inf)
    order = np.argsort(-scores, kind="stable")[: max(1, int(np.isfinite(scores).sum()))]
    scores[order] = np.maximum(scores[order], -100)
    listed = np.isin(np.arange(n), order)
    table = lists_of(listed[None, None, None], scores.astype(np.float16)[None, None, None])
    group_scores = np.full(n, NOT_SCORED, np.int64)
    group_scores[order] = np.rint(scores[order].astype(np.float64) * 2**24)
    for top_k in {1, n // 20, n // 2, n - 1}:
        np.testing.assert_array_equal(search_one_head(list_index(table), top_k), expected(group_scores, top_k))
    for top_k in (n, n + 3):
        np.testing.assert_array_equal(search_one_head(list_index(table), top_k), np.arange(n))


@pytest.mark.parametrize("low_part", [0.5, 0.9, 0.99])
def test_top_k_is_exact_if_the_guess_from_the_sample_is_too_high(low_part: float) -> None:
    """Only the sampled places hold large values, so the sample overestimates how many keys reach the guess."""
    n, step = 100_000, 100_000 // SAMPLE
    group_scores = np.random.default_rng(0).integers(0, 1000, n)
    sampled = []
    for first in range(0, n, RANGE_KEYS):
        i = np.arange((min(first + RANGE_KEYS, n) - first) // step)
        sampled.append(first + i * step + i % step)
    places = np.concatenate(sampled)
    group_scores[places[: int(len(places) * (1 - low_part))]] += 1000
    group_scores = scores(group_scores)
    for top_k in (10, 500, 5000, 60_000):
        np.testing.assert_array_equal(select(group_scores, top_k), expected(group_scores, top_k))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_count_at_least_and_kth_largest_agree_with_numpy(n: int) -> None:
    values = np.random.default_rng(n).integers(-50, 50, n).astype(np.int32)
    for threshold in (-51, -50, 0, 49, 50, 2**31 - 1, 2**31):
        assert count_at_least(values, n, threshold) == (values.astype(np.int64) >= threshold).sum()
    for k in range(1, n + 1):
        found = kth_largest(values, n, k, NOT_SCORED)
        kth = np.sort(values)[::-1][k - 1]
        assert (values >= found).sum() >= k, f"too few reach {found}"
        assert (values[values >= found] >= kth).all(), f"{found} lets in values below the {k}-th"
