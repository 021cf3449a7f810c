"""A tail equals a table that was built over the longer context."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from csattn.index import ListIndex
from csattn.table.lists import LARGEST_SCORE
from csattn.table.tail import FOUND_AT_ONCE, ListTail, score_key
from tests.search.synthetic import IndexSpec, make_index, make_lists
from tests.table.invariants import check


def new_keys_of(tail_seed: int, spec: IndexSpec, num_rows: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(tail_seed)
    rows = [rng.standard_normal((spec.num_heads, spec.head_dim), dtype=np.float32) for _ in range(num_rows)]
    return np.array(rows, np.float32).reshape(num_rows, spec.num_heads, spec.head_dim)


def test_score_key_is_the_centred_key_times_the_codebook() -> None:
    spec = IndexSpec(layout="lists", num_heads=3)
    index = make_index(spec)
    k = np.random.default_rng(5).standard_normal((3, 32), dtype=np.float32)
    parts = (k - index.key_mean).reshape(3, 8, 4)
    np.testing.assert_allclose(score_key(k, index), np.einsum("hbd,hbjd->hbj", parts, index.codebooks), atol=1e-5)


def test_index_heads_of_one_group_share_their_kv_head() -> None:
    spec = IndexSpec(layout="lists", num_heads=4)
    index = make_index(spec)
    k = np.random.default_rng(5).standard_normal((2, 32), dtype=np.float32)
    np.testing.assert_array_equal(score_key(k, index), score_key(np.repeat(k, 2, axis=0), index))


@pytest.mark.parametrize("context_len, num_rows", [(1, 3), (40, 1), (40, 100), (333, 40), (1100, 400)])
def test_list_tail_equals_lists_built_over_all_keys(context_len: int, num_rows: int) -> None:
    spec = IndexSpec(layout="lists", context_len=context_len)
    index = make_index(spec)
    tail = ListTail(index)
    for k in new_keys_of(4, spec, num_rows):
        tail.append(k)
        check(tail)
    # lists of all scores, cut to their old length: what a build over the longer context would keep
    new = np.stack([score_key(k, index) for k in new_keys_of(4, spec, num_rows)], axis=-1)
    for where in np.ndindex(*index.codebooks.shape[:3]):
        old_keys, old_scores = index.table.entries(*where)
        keys = np.concatenate([old_keys, context_len + np.arange(num_rows)])
        scores = np.concatenate([old_scores, new[where].astype(np.float16)])
        best = np.sort(np.lexsort((keys, -scores.astype(np.float32)))[: index.table.list_len])
        got_keys, got_scores = tail.entries(*where)
        np.testing.assert_array_equal(got_keys, keys[best])
        np.testing.assert_array_equal(got_scores, scores[best])


@pytest.mark.parametrize("factor", [1e5, 1e30, np.inf, np.nan])
def test_a_score_that_is_too_large_is_clipped_to_the_largest(factor: float) -> None:
    """Lists from a build do the same. A key of NaN enters no list."""
    spec = IndexSpec(layout="lists", context_len=40)
    tail = ListTail(make_index(spec))
    k = new_keys_of(4, spec, 1)[0]
    k[0, 3] *= factor
    tail.append(k)
    check(tail)
    assert np.abs(tail.inserted_scores).max() <= LARGEST_SCORE
    assert (tail.inserted_scores[0].max() == LARGEST_SCORE) == (factor == factor)


def test_equal_scores_do_not_enter_a_full_list() -> None:
    spec = IndexSpec(layout="lists", context_len=40, num_heads=1)
    index = make_index(spec)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 32), dtype=np.float32) * 10  # large enough to enter many lists
    tail = ListTail(index)
    tail.append(k)
    entered = tail.num_inserted.copy()
    assert entered.any()
    for _ in range(index.table.list_len - 1):
        tail.append(k)
    full = tail.num_inserted.copy()
    assert full.max() == index.table.list_len
    tail.append(k)
    check(tail)
    np.testing.assert_array_equal(tail.num_inserted, full)


def test_zero_scores_are_never_minus_zero() -> None:
    scores = np.full((1, 1, 1, 4), -1.0, np.float32)
    index = ListIndex(
        np.full((1, 1, 1, 1), -1.0, np.float32),
        np.zeros((1, 1), np.float32),
        make_lists(scores, 1.0),
        True,
    )
    tail = ListTail(index)
    tail.append(np.zeros((1, 1), np.float32))  # -1 * 0
    assert tail.num_inserted[0, 0, 0] == 1
    assert not np.signbit(tail.inserted_scores[0, 0, 0, 0])


def test_check_detects_inconsistent_lists() -> None:
    table = make_index(IndexSpec(layout="lists", context_len=1040)).table
    check(table)
    for wrong, told in (
        ({"listed": table.listed[..., ::-1, :].copy()}, "out of range"),
        ({"listed": table.listed & ~np.uint32(0xFF)}, "another length"),
        ({"starts": table.starts + np.int32(1)}, "begin elsewhere"),
        ({"scores": np.full_like(table.scores, np.nan)}, "NaN or infinite"),
        ({"scores": np.full_like(table.scores, -0.0)}, r"-0\.0"),
        ({"least": table.least + np.float16(1)}, "the least score is another"),
    ):
        with pytest.raises(AssertionError, match=told):
            check(replace(table, **wrong))


@pytest.mark.parametrize("context_len", [40, 1100])
def test_of_equal_scores_the_last_key_is_evicted_first(context_len: int, rng: np.random.Generator) -> None:
    """Of equal scores, the last key leaves first. Lists have few distinct scores, and some 100 entries leave."""
    keys = rng.integers(-2, 3, (1, context_len)).astype(np.float32)
    scores = np.stack([keys, -keys])[None, None, :, 0]
    codebooks = np.array([[[[1], [-1]]]], np.float32)
    index = ListIndex(codebooks, np.zeros((1, 1), np.float32), make_lists(scores, 0.25), True)
    tail, own = ListTail(index), rng.integers(-2, 4, 3 * FOUND_AT_ONCE + 5).astype(np.float32)
    for key in own:
        tail.append(key.reshape(1, 1))
        check(tail)
    for centroid, sign in enumerate((1, -1)):
        every = sign * np.concatenate([keys[0], own])
        best = sorted(range(len(every)), key=lambda i: (-every[i], i))[: index.table.list_len]
        got_keys, got_scores = tail.entries(0, 0, centroid)
        assert got_keys.tolist() == sorted(best)
        np.testing.assert_array_equal(got_scores, every[got_keys])


@settings(max_examples=40)
@given(
    context_len=st.integers(5, 40),
    list_len=st.sampled_from([0.1, 0.5, 1.0]),
    new_keys=st.lists(st.integers(-3, 3), max_size=25),
)
def test_try_insert_keeps_the_size_the_order_and_the_better_keys(
    context_len: int, list_len: float, new_keys: list[int]
) -> None:
    """New keys are small multiples of one direction, so scores tie, and repeated keys occur."""
    spec = IndexSpec(layout="lists", context_len=context_len, list_len=list_len)
    index = make_index(spec)
    tail = ListTail(index)
    direction = np.random.default_rng(9).standard_normal((spec.num_heads, spec.head_dim), dtype=np.float32)
    scored = []
    for factor in new_keys:
        k = (factor * direction).astype(np.float32)
        tail.append(k)
        check(tail)
        scored.append(score_key(k, index).astype(np.float16))
    table = index.table
    for head, b, c in np.ndindex(table.least.shape):
        entries = [(-float(s), int(i)) for i, s in zip(*table.entries(head, b, c), strict=True)]
        entries += [(-float(s[head, b, c]), context_len + t) for t, s in enumerate(scored)]
        want = sorted(entries)[: table.list_len]
        got = [(-float(s), int(i)) for i, s in zip(*tail.entries(head, b, c), strict=True)]
        assert sorted(got) == want
