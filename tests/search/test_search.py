"""Every CPU search agrees with the definition in `reference.py`."""

import numpy as np
import pytest
from numpy.typing import NDArray

from csattn.index import ListIndex
from csattn.search import SearchPool, reference
from csattn.search.plan import RANGE_KEYS
from csattn.search.run import LayerSearch
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.sketch import SketchIndex
from csattn.sketch import reference as sketch_reference
from csattn.table.lists import lists_of
from csattn.table.tail import ListTail
from tests.search.synthetic import (
    IndexSpec,
    make_index,
    make_queries,
    make_tail_of,
    poisoned_selection,
    poisoned_workspace,
    search,
)
from tests.selections import check_selection

LAYOUTS = ["sketch", "lists"]
WITH_TAILS = [("sketch", 0), ("lists", 0), ("lists", 1), ("lists", 70)]
SCALE = 0.2  # softmax scale


def run_both(
    q: NDArray[np.float32],
    index: ListIndex | SketchIndex,
    tail: ListTail | None,
    top_k: int,
    sink_len: int = 4,
    window_len: int = 16,
    softmax_scale: float = SCALE,
) -> tuple[Selection, Selection]:
    """Return the kernel's selection and the reference's. The kernel runs first, into poisoned memory."""
    got = poisoned_selection(index.num_heads, top_k)
    want = empty_token_selections(1, index.num_heads, top_k)[0]
    search(q, index, tail, sink_len, window_len, softmax_scale, poisoned_workspace(), got)
    reference.search(q, index, tail, top_k, sink_len, window_len, softmax_scale, want)
    return got, want


def assert_same_group_scores(
    got: Selection,
    want: Selection,
    q: NDArray[np.float32],
    index: ListIndex | SketchIndex,
    tail: ListTail | None,
    scale: float = SCALE,
) -> None:
    """Compare choices over sketches bit for bit, and over lists by the group scores of the chosen rows, in order.

    Over lists, rounding of exp may swap rows whose group scores nearly tie.
    """
    np.testing.assert_array_equal(got.valid_len, want.valid_len)
    check_selection(got, index.context_len + (tail.num_rows if tail else 0))
    if isinstance(index, SketchIndex):
        np.testing.assert_array_equal(got.kv_indices, want.kv_indices)
        return
    group_size = q.shape[0] // index.num_heads
    for head in range(index.num_heads):
        rows = [reference.score_keys(q[head * group_size + g], index, tail, head) for g in range(group_size)]
        group_scores, scored = reference.combine_group(rows, scale)
        mine, theirs = got.kv_indices[head, : got.valid_len[head]], want.kv_indices[head, : want.valid_len[head]]
        assert scored[mine].sum() == scored[theirs].sum(), f"head {head} chose other keys that no list holds"
        np.testing.assert_allclose(np.sort(group_scores[mine]), np.sort(group_scores[theirs]), rtol=3e-5, atol=0)


@pytest.mark.parametrize("layout, tail_rows", WITH_TAILS)
@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("context_len", [1, 63, 64, 65, 1009])
def test_search_agrees_with_the_reference(layout: str, group_size: int, context_len: int, tail_rows: int) -> None:
    spec = IndexSpec(layout=layout, context_len=context_len)
    index, q = make_index(spec), make_queries(spec, group_size, scale=3.0)
    tail = make_tail_of(index, spec, tail_rows)
    got, want = run_both(q, index, tail, top_k=50)
    if group_size == 1:
        np.testing.assert_array_equal(got.kv_indices, want.kv_indices)
    assert_same_group_scores(got, want, q, index, tail)


@pytest.mark.parametrize(
    "head_dim, num_fine, num_coarse", [(8, 1, 0), (64, 2, 2), (80, 3, 1), (96, 3, 3), (256, 8, 8), (512, 16, 16)]
)
@pytest.mark.parametrize("context_len", [1000, 4100, 7000])
def test_sketches_of_any_shape_agree_with_the_reference(
    head_dim: int, num_fine: int, num_coarse: int, context_len: int
) -> None:
    spec = IndexSpec(context_len=context_len, head_dim=head_dim, num_fine=num_fine, num_coarse=num_coarse)
    index, q = make_index(spec), make_queries(spec, 2)
    got, want = run_both(q, index, None, 50, softmax_scale=head_dim**-0.5)
    assert_same_group_scores(got, want, q, index, None, head_dim**-0.5)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("context_len", [900, 5000, RANGE_KEYS + 3072 + 5])
def test_marked_rows_are_chosen_first_where_they_are_few(group_size: int, context_len: int) -> None:
    spec = IndexSpec(context_len=context_len)
    index, q = make_index(spec), make_queries(spec, group_size, scale=3.0)
    assert isinstance(index, SketchIndex)
    marked = np.flatnonzero(index.marked_rows(0)[4 : context_len - 16]) + 4
    for top_k in (1, 2 * int(index.marked_rows(0).sum()) - 1, 2 * int(index.marked_rows(0).sum()), 300):
        got, want = run_both(q, index, None, top_k)
        np.testing.assert_array_equal(got.kv_indices, want.kv_indices)
        assert not index.uses_marks(top_k) or np.isin(marked, got.kv_indices[0]).all()


@pytest.mark.parametrize(
    "head_dim, num_fine, num_coarse, group_size",
    [(8, 1, 0, 1), (64, 2, 2, 7), (80, 2, 2, 2), (96, 3, 3, 16), (128, 4, 4, 4), (256, 8, 8, 5), (512, 16, 16, 8)],
)
@pytest.mark.parametrize("context_len", [1, 65, 1009, RANGE_KEYS + 3072 + 5])
def test_attention_to_rows_that_are_not_chosen_agrees_with_the_reference(
    head_dim, num_fine, num_coarse, group_size, context_len
) -> None:
    spec = IndexSpec(context_len=context_len, head_dim=head_dim, num_fine=num_fine, num_coarse=num_coarse)
    index, q = make_index(spec), make_queries(spec, group_size)
    assert isinstance(index, SketchIndex)
    chosen, plain = poisoned_selections(index, 1, group_size, 50), poisoned_selection(2, 50)
    LayerSearch(q[None], index, None, 4, 16, SCALE, chosen).run(poisoned_workspace())
    search(q, index, None, 4, 16, SCALE, SearchWorkspace(), plain)
    np.testing.assert_array_equal(chosen.kv_indices[0], plain.kv_indices)
    is_rest = np.zeros((2, context_len), np.bool_)
    is_rest[:, 4 : context_len - 16] = True
    for head, valid in enumerate(plain.valid_len):
        is_rest[head, plain.kv_indices[head, :valid]] = False
    want, want_lse = sketch_reference.attend_rest(q, index, is_rest, SCALE)
    assert chosen.rest is not None
    (sums,), (tops,), (totals,) = np.split(chosen.rest, [head_dim, head_dim + 1], axis=2)
    if not is_rest.any():
        assert (tops == -np.inf).all() and not sums.any() and not totals.any()
        return
    np.testing.assert_allclose(sums / totals, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    np.testing.assert_allclose((tops + np.log(totals))[:, 0], want_lse, rtol=1e-5, atol=3e-4)


def poisoned_selections(index: SketchIndex, num_tokens: int, group_size: int, top_k: int) -> TokenSelections:
    """Return outputs for selections and the rest, filled with values that no search may leave there."""
    shape = num_tokens, index.num_heads
    rest = np.full((num_tokens, index.num_heads * group_size, index.head_dim + 2), np.nan, np.float32)
    return TokenSelections(np.full((*shape, top_k), -777, np.int32), np.full(shape, -777, np.int32), rest)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("group_size", "context_len"),
    [
        *((size, RANGE_KEYS + more) for size in (1, 3) for more in (-1, 0, 1, RANGE_KEYS + 65)),
        (16, 4 * RANGE_KEYS + 65),  # more ranges than a row has pieces
    ],
)
@pytest.mark.parametrize("tail_rows", [0, 130])
def test_contexts_of_several_ranges_agree_with_the_reference(
    layout: str, group_size: int, context_len: int, tail_rows: int
) -> None:
    spec = IndexSpec(layout=layout, context_len=context_len, num_subspaces=4, num_centroids=2, num_heads=1)
    index, q = make_index(spec), make_queries(spec, group_size, scale=3.0)
    tail = make_tail_of(index, spec, tail_rows if layout == "lists" else 0)
    got, want = run_both(q, index, tail, context_len // 20)
    assert_same_group_scores(got, want, q, index, tail)


def test_a_tail_longer_than_a_range_agrees_with_the_reference() -> None:
    spec = IndexSpec(layout="lists", context_len=100, num_subspaces=2, num_centroids=2, num_heads=1)
    index, q = make_index(spec), make_queries(spec, 2)
    tail = make_tail_of(index, spec, RANGE_KEYS + 10)
    got, want = run_both(q, index, tail, 400)
    assert_same_group_scores(got, want, q, index, tail)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("top_k", [0, 1, 7, 978, 979, 980, 981, 2000])
def test_any_top_k_agrees_with_the_reference(layout: str, group_size: int, top_k: int) -> None:
    spec = IndexSpec(layout=layout, context_len=1000, list_len=1.0)
    index, q = make_index(spec), make_queries(spec, group_size)
    got, want = run_both(q, index, None, top_k)  # 980 candidates: 1000 rows without 4 sinks and a window of 16
    assert (got.valid_len == min(top_k, 980)).all()
    assert_same_group_scores(got, want, q, index, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sink_len, window_len", [(0, 0), (0, 1), (1, 0), (500, 500), (500, 501), (2000, 1), (3, 2000), (2**31 + 1, 1)]
)
def test_resident_rows_are_never_chosen(layout: str, sink_len: int, window_len: int) -> None:
    spec = IndexSpec(layout=layout, context_len=1000, list_len=1.0)
    index, q = make_index(spec), make_queries(spec, 2)
    tail = make_tail_of(index, spec, 3 if layout == "lists" else 0)
    got, want = run_both(q, index, tail, 1003, sink_len, window_len)
    expected = list(range(sink_len, 1000 - window_len))
    if layout == "sketch":
        for head in range(index.num_heads):
            assert got.kv_indices[head, : got.valid_len[head]].tolist() == expected
    np.testing.assert_array_equal(got.kv_indices, want.kv_indices)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("distinct_keys", [1, 2, 11])
@pytest.mark.parametrize("context_len", [5000, 3 * RANGE_KEYS + 77])
def test_ties_go_to_the_lowest_index(layout: str, group_size: int, distinct_keys: int, context_len: int) -> None:
    spec = IndexSpec(layout=layout, context_len=context_len, distinct_keys=distinct_keys)
    index, q = make_index(spec), make_queries(spec, group_size)
    got, want = run_both(q, index, None, 321)
    np.testing.assert_array_equal(got.kv_indices, want.kv_indices)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [1, 4])
def test_a_zero_query_takes_the_first_rows(layout: str, group_size: int) -> None:
    spec = IndexSpec(layout=layout, context_len=1000, list_len=1.0)
    index, q = make_index(spec), make_queries(spec, group_size, scale=0.0)
    got, _ = run_both(q, index, None, 30)
    np.testing.assert_array_equal(got.kv_indices, np.tile(np.arange(4, 34), (2, 1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_queries_in_a_group_do_not_change_the_choice(layout: str) -> None:
    spec = IndexSpec(layout=layout, context_len=3000, list_len=1.0)
    index, q = make_index(spec), make_queries(spec, 3)
    q[[1, 2, 4, 5]] = 0
    got, _ = run_both(q, index, None, 100)
    alone, _ = run_both(np.ascontiguousarray(q[[0, 3]]), index, None, 100)
    np.testing.assert_array_equal(got.kv_indices, alone.kv_indices)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [30.0, 300.0, 3000.0, 1e8, 1e30])
@pytest.mark.parametrize("context_len", [2000, 3 * RANGE_KEYS])
def test_sharp_softmax_neither_overflows_nor_underflows(layout: str, scale: float, context_len: int) -> None:
    spec = IndexSpec(layout=layout, context_len=context_len)
    index, q = make_index(spec), make_queries(spec, 3, scale=scale)
    got, want = run_both(q, index, None, 200)
    assert_same_group_scores(got, want, q, index, None)


def test_listed_keys_whose_group_scores_underflow_can_still_be_chosen() -> None:
    """One of two subspaces has scores beyond the range of exp2, the other has negative scores near 0."""
    listed, scores = np.zeros((1, 2, 1, 220), np.bool_), np.zeros((1, 2, 1, 220), np.float16)
    listed[0, 0, 0, 104:204], listed[0, 1, 0, 4:104] = True, True
    scores[0, 0], scores[0, 1] = 1.0, -1.0
    table = lists_of(listed, scores)
    index = ListIndex(np.ones((1, 2, 1, 2), np.float32), np.zeros((1, 4), np.float32), table, weigh_by_norm=True)
    got, want = run_both(np.array([[1e37, 0, 1e-20, 0]] * 2, np.float32), index, None, 150)
    np.testing.assert_array_equal(got.valid_len, want.valid_len)
    assert np.isin(np.arange(104, 204), got.kv_indices).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", [np.nan, np.inf, 1e30])
def test_nan_infinite_and_huge_queries_give_sound_selections(layout: str, fault: float) -> None:
    spec = IndexSpec(layout=layout, context_len=2000)
    index, q = make_index(spec), make_queries(spec, 3)
    q[0, 5] = fault
    q[3, 0] = -fault
    with np.errstate(invalid="ignore"):
        got, want = run_both(q, index, None, 100)
    check_selection(got, 2000)
    if layout == "sketch":
        np.testing.assert_array_equal(got.kv_indices, want.kv_indices)


def test_an_index_with_weigh_by_norm_off_uses_unit_weights() -> None:
    spec = IndexSpec(layout="lists", weigh_by_norm=False)
    index, q = make_index(spec), make_queries(spec, 1)
    got, want = run_both(q, index, None, 50)
    np.testing.assert_array_equal(got.kv_indices, want.kv_indices)
    scaled, _ = run_both(q * 2, index, None, 50)
    np.testing.assert_array_equal(scaled.kv_indices, want.kv_indices)


@pytest.mark.parametrize("layout, tail_rows", WITH_TAILS)
def test_several_tokens_in_one_search_choose_as_in_separate_searches(layout: str, tail_rows: int) -> None:
    spec = IndexSpec(layout=layout, context_len=777)
    index = make_index(spec)
    tail = make_tail_of(index, spec, tail_rows)
    q = np.stack([make_queries(spec, 2, seed=t) for t in range(5)])
    got = empty_token_selections(5, 2, 40)
    LayerSearch(q, index, tail, 4, 16, SCALE, got).run(SearchWorkspace())
    for token in range(5):
        alone = poisoned_selection(2, 40)
        search(q[token], index, tail, 4, 16, SCALE, SearchWorkspace(), alone)
        np.testing.assert_array_equal(got[token].kv_indices, alone.kv_indices)
        np.testing.assert_array_equal(got[token].valid_len, alone.valid_len)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    layers = []
    for seed, layout in enumerate(LAYOUTS):
        spec = IndexSpec(layout=layout, context_len=40_000, seed=seed, num_heads=3)
        q = np.stack([make_queries(spec, 2, seed=t) for t in range(2)])
        index = make_index(spec)
        out = TokenSelections(np.full((2, 3, 500), -777, np.int32), np.full((2, 3), -777, np.int32))
        if isinstance(index, SketchIndex):
            out = poisoned_selections(index, 2, 2, 500)
        layers.append(LayerSearch(q, index, None, 4, 16, SCALE, out))
    with SearchPool(num_threads) as pool:
        pool.search_layers(layers)
    for layer in layers:
        alone = empty_token_selections(2, 3, 500)
        LayerSearch(layer.q, layer.index, None, 4, 16, SCALE, alone).run(SearchWorkspace())
        np.testing.assert_array_equal(layer.out.kv_indices, alone.kv_indices)
        np.testing.assert_array_equal(layer.out.valid_len, alone.valid_len)
    found = layers[0].out.rest
    assert found is not None
    rest = found.copy()
    layers[0].run(SearchWorkspace())
    np.testing.assert_array_equal(found, rest)


def test_a_sketch_with_a_tail_is_refused() -> None:
    lists, spec = make_index(IndexSpec(layout="lists")), IndexSpec()
    with pytest.raises(AssertionError, match="a sketch cannot use"):
        run_both(make_queries(spec, 1), make_index(spec), ListTail(lists), 5)
