"""Every selector returns valid rows, independent of other requests, and all rows if all are kept."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.attention import reference
from csattn.errors import ConfigError
from csattn.search import SearchPool, empty_token_selections
from csattn.search.reference import search
from csattn.selection import Selection
from csattn.selector_names import ABOUT, SELECTOR_NAMES
from csattn.selectors import (
    CentroidSelector,
    ContextLayer,
    index_bytes,
    predictor_bytes,
    prepare,
    search_bytes,
    selector_for,
)
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.top_rows import top_rows
from csattn.table.tail import ListTail
from tests.search.synthetic import IndexSpec, make_index
from tests.selections import check_selection
from tests.selectors.requests import (
    HEAD_DIM,
    NUM_KV_HEADS,
    SCALE,
    Step,
    decode,
    make_layer,
    make_tail,
    make_view,
    resident_rows,
)
from tests.sketch.synthetic import make_heads, make_sketch

CHOOSING = [name for name in SELECTOR_NAMES if name not in ("csattn", "full", "window")]
TOP_K = [name for name in CHOOSING if ABOUT[name].keeps_top_k]


def same(got: Selection, want: Selection) -> bool:
    pairs = [(got.kv_indices, want.kv_indices), (got.valid_len, want.valid_len), (got.log_weights, want.log_weights)]
    if got.rest is not None and want.rest is not None:
        pairs += [(got.rest.out, want.rest.out), (got.rest.share, want.rest.share)]
    return all(np.array_equal(a, b) for a, b in pairs if a is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("context_len", "group_size"), [(1, 3), (11, 1), (12, 3), (70, 3)])
@pytest.mark.parametrize("name", CHOOSING)
def test_selections_are_valid_and_contain_no_resident_rows(name, context_len, group_size, dtype) -> None:
    layer, view = make_layer(context_len, group_size, dtype=dtype), make_view(context_len)
    num_middle = view.middle.stop - view.middle.start
    for step in decode(prepare(name, layer).selector(view), view, make_tail(20, group_size)):
        check_selection(step.chosen, context_len + step.num_left)
        rows = step.chosen.kv_indices[step.chosen.kv_indices >= 0]
        assert ((rows >= view.middle.start) & (rows < view.middle.stop) | (rows >= context_len)).all()
        if name in TOP_K:
            assert (step.chosen.valid_len == min(view.top_k, num_middle + step.num_left)).all()


@pytest.mark.parametrize("name", CHOOSING)
def test_two_requests_over_one_context_are_independent(name) -> None:
    layer, view = make_layer(70), make_view(70)
    prepared, again = prepare(name, layer), prepare(name, layer)
    tails = make_tail(20, seed=1), make_tail(20, seed=2)
    alone = [list(decode(again.selector(view), view, tail)) for tail in tails]
    together = zip(*(decode(prepared.selector(view), view, tail) for tail in tails), strict=True)
    for step, pair in enumerate(together):
        for got, want in zip(pair, (alone[0][step], alone[1][step]), strict=True):
            assert same(got.chosen, want.chosen)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_shallow_copy_is_a_snapshot(name) -> None:
    """A step that fails is rerun with copies made before it."""
    layer, view, tail = make_layer(70), make_view(70), make_tail(20)
    selector = prepare(name, layer).selector(view)
    steps = list(decode(selector, view, tail))
    before, after = copy(selector), copy(selector)
    wanted = after.select(steps[-1].q, steps[-1].recent)
    selector.select(steps[3].q, steps[-1].recent)
    selector.append(*np.full((2, NUM_KV_HEADS, HEAD_DIM), 9, np.float32))
    assert same(before.select(steps[-1].q, steps[-1].recent), wanted)


@pytest.mark.parametrize("name", [name for name in TOP_K if name != "h2o"])
def test_of_equal_rows_the_first_are_chosen(name) -> None:
    layer, view = make_layer(70), make_view(70)
    alike = ContextLayer(
        layer.keys[:, :1].expand(-1, 70, -1), layer.values, layer.num_q_heads, layer.attention_received
    )
    selector = prepare(name, alike).selector(view)
    chosen = selector.select(make_tail(1).q[0].numpy(), make_tail(1).kv)
    np.testing.assert_array_equal(chosen.kv_indices, np.tile(np.arange(3, 3 + view.top_k), (NUM_KV_HEADS, 1)))


def test_rows_with_scores_of_minus_infinity_are_chosen_before_resident_ones() -> None:
    """SparQ's sums of logits may be minus infinity."""
    view = make_view(70)
    scores = torch.full((1, 70), -torch.inf)
    scores[0, view.middle.start + 5] = torch.nan
    chosen = top_rows(scores, view).kv_indices[0]
    first = [row for row in range(view.middle.start, view.middle.stop) if row != view.middle.start + 5]
    assert chosen.tolist() == sorted([view.middle.start + 5, *first[: view.top_k - 1]])


def test_h2o_evicts_the_latest_of_rows_with_equal_attention() -> None:
    layer, view = make_layer(70), make_view(70)
    nothing = ContextLayer(layer.keys, layer.values, layer.num_q_heads, lambda: torch.zeros(layer.num_q_heads, 70))
    selector = prepare("h2o", nothing).selector(view)
    selector.append(np.zeros((NUM_KV_HEADS, HEAD_DIM), np.float32), np.zeros((NUM_KV_HEADS, HEAD_DIM), np.float32))
    chosen = selector.select(make_tail(1).q[0].numpy(), make_tail(1).kv)
    np.testing.assert_array_equal(chosen.kv_indices, np.tile(np.arange(3, 3 + view.top_k), (NUM_KV_HEADS, 1)))


def everything(name: str, layer: ContextLayer):
    """Prepare that selector with options under which no row is left out."""
    return PreparedMagicpig(layer, num_bits=1, num_tables=300) if name == "magicpig" else prepare(name, layer)


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("name", CHOOSING)
def test_a_selector_that_keeps_all_rows_equals_full_attention(name, group_size) -> None:
    """This includes rows that have left the tail's window, while there is room. MagicPIG's weights are nearly 1."""
    context_len, num_tokens = 50, 19  # 39 middle rows and 11 rows of the tail: context_len in all
    layer = make_layer(context_len, group_size)
    view = make_view(context_len, keep=1.0)
    tail = make_tail(num_tokens, group_size)
    kv = torch.cat([torch.stack([layer.keys, layer.values], dim=2), tail.kv], dim=1)
    for token, step in enumerate(decode(everything(name, layer).selector(view), view, tail)):
        near = [*resident_rows(view), *range(context_len + step.num_left, context_len + token + 1)]
        out = attend_to(step, kv, near)
        grouped = tail.q[token].view(1, NUM_KV_HEADS, group_size, HEAD_DIM)
        rows = kv[None, :, : context_len + token + 1]
        want, _ = reference.attend(grouped, rows[..., 0, :], rows[..., 1, :], SCALE)
        rough = name == "magicpig"
        torch.testing.assert_close(out, want.view_as(out), rtol=0.05 if rough else 1e-4, atol=0.05 if rough else 1e-5)


def attend_to(step: Step, kv: torch.Tensor, near: list[int]) -> torch.Tensor:
    """Return attention [num_q_heads, head_dim] to near rows, chosen rows with their weights, and the rest."""
    chosen, outs = step.chosen, []
    for head, query in enumerate(torch.from_numpy(step.q)):
        index_head = head * len(chosen.valid_len) // len(step.q)
        far = chosen.kv_indices[index_head, : chosen.valid_len[index_head]].tolist()
        rows, log_weights = kv[head * len(kv) // len(step.q), [*near, *far]], torch.zeros(len(near) + len(far))
        if chosen.log_weights is not None:
            log_weights[len(near) :] = torch.from_numpy(chosen.log_weights[index_head, : len(far)])
        k, v = rows[None, None, :, 0], rows[None, None, :, 1]
        outs.append(reference.attend(query[None, None, None], k, v, SCALE, log_weights=log_weights)[0][0, 0, 0])
    out = torch.stack(outs)
    if chosen.rest is None:
        return out
    share = torch.from_numpy(chosen.rest.share)[:, None]
    return (1 - share) * out + share * torch.from_numpy(chosen.rest.out)


@pytest.mark.parametrize("keep", [0.01, 1.0])
@pytest.mark.parametrize("name", SELECTOR_NAMES)
def test_keep_of_1_selects_full_attention_by_name(name, keep) -> None:
    view = make_view(100, keep=keep)
    assert selector_for(name, view) == ("full" if keep == 1.0 and ABOUT[name].keeps_top_k else name)


def test_an_unknown_selector_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown selector 'best'; choose one of csattn, exact"):
        selector_for("best", make_view(10))


@pytest.mark.parametrize(
    ("name", "held", "read"),
    [
        # 2 KV heads, 64 keys of 16 channels in bfloat16: 4096 bytes of keys
        ("exact", 0, 4096),
        ("quest", 2 * 4096 // 16, 2 * 4096 // 16),
        ("sparq", 4096 + 2 * 16 * 4, 4096 // 4),
        ("pqcache", 2 * 64 * 2 + 2 * 64 * 16 * 2, 2 * 64 * 2 + 2 * 64 * 16 * 2),
        ("h2o", 2 * 64 * 4, 0),
    ],
)
def test_index_and_search_bytes_equal_those_of_the_papers_layouts(name, held, read) -> None:
    layer, view = make_layer(64, dtype=torch.bfloat16), make_view(64)
    prepared = prepare(name, layer)
    selector = prepared.selector(view)
    selector.select(make_tail(1).q[0].numpy(), make_tail(1).kv.bfloat16())
    assert prepared.index_bytes == held
    assert selector.search_bytes == read


def test_a_sketch_search_reads_at_least_its_codes_and_less_than_the_index(rng) -> None:
    index = make_sketch(*make_heads(rng, NUM_KV_HEADS, 3, 300, HEAD_DIM), num_fine=1, num_coarse=0)
    assert index_bytes(index) == index.num_bytes and predictor_bytes(index) == 0
    assert index.codes.nbytes < search_bytes(index, 6) < index.num_bytes


def test_a_list_search_reads_one_list_per_query_head_and_subspace() -> None:
    spec = IndexSpec(context_len=1000, layout="lists")
    index = make_index(spec)
    read = search_bytes(index, 6) - index.codebooks.nbytes
    assert read == 6 * spec.num_subspaces * (1024 // 8 + 4 + 2 * 256)  # a bit per key, 250 scores in units of 16
    assert index_bytes(index) > sum(array.nbytes for array in index.table.arrays.values())
    with_predictor = replace(index, next_query=np.zeros((6, HEAD_DIM + 1, HEAD_DIM), np.float32))
    assert index_bytes(with_predictor) == index_bytes(index)
    assert predictor_bytes(with_predictor) == 6 * (HEAD_DIM + 1) * HEAD_DIM * 4


def test_rows_of_the_tail_join_the_lists(rng) -> None:
    """The choice is the definition's at every step."""
    spec, tail = IndexSpec(context_len=1000, head_dim=HEAD_DIM, layout="lists"), make_tail(20)
    index, view = make_index(spec), make_view(1000)
    joined = ListTail(index)
    with SearchPool(1) as pool:
        selector = CentroidSelector(index, pool, 6, view)
        for step in decode(selector, view, tail):
            while joined.num_rows < step.num_left:
                joined.append(tail.kv[:, joined.num_rows, 0].numpy())
            want = empty_token_selections(1, index.num_heads, view.top_k)[0]
            config = view.config
            search(step.q, index, joined, view.top_k, config.sink_len, config.window_len, SCALE, want)
            assert same(step.chosen, want)
    assert joined.num_rows == 12
    assert selector.search_bytes == search_bytes(index, 6)
