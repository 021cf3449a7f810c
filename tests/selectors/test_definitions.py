"""Each selector makes its definition's choice at every step, including rows that have left the tail's window."""

import numpy as np
import pytest
import torch

from csattn.selectors.exact import ExactSelector
from csattn.selectors.h2o import PreparedH2o
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.quest import PreparedQuest
from csattn.selectors.sparq import PreparedSparq
from tests.selectors import definitions
from tests.selectors.requests import NUM_KV_HEADS, decode, make_layer, make_tail, make_view, resident_rows

# no middle row, one middle row, and contexts with and without a partial page
SHAPES = [(1, 3), (11, 1), (12, 3), (70, 1), (70, 3), (64, 1)]
NUM_STEPS = 22
pytestmark = pytest.mark.parametrize(("context_len", "group_size"), SHAPES)


def steps(selector, layer, view, group_size):
    """Yield, per step and KV head: the head, the group's queries, all indexed keys, and the step."""
    tail = make_tail(NUM_STEPS, group_size)
    for step in decode(selector, view, tail):
        for head in range(NUM_KV_HEADS):
            keys = torch.cat([layer.keys[head], tail.kv[head, : step.num_left, 0]]).double().numpy()
            q = step.q[head * group_size : (head + 1) * group_size].astype(np.float64)
            yield head, q, keys, step


def chosen_rows(step, head: int) -> list[int]:
    return step.chosen.kv_indices[head, : step.chosen.valid_len[head]].tolist()


def test_exact_selection_equals_its_definition(context_len, group_size) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    for head, q, keys, step in steps(ExactSelector(layer, view), layer, view, group_size):
        group_scores = definitions.exact_group_scores(q, keys)
        assert chosen_rows(step, head) == definitions.best_rows(group_scores, resident_rows(view), view.top_k)


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_quest_selection_equals_its_definition(context_len, group_size, page_size) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    selector = PreparedQuest(layer, page_size).selector(view)
    for head, q, keys, step in steps(selector, layer, view, group_size):
        group_scores = definitions.quest_group_scores(q, keys, context_len, page_size)
        # computed scores of tied pages may differ in the last bits: compare the chosen scores, not the rows
        want = definitions.best_rows(group_scores, resident_rows(view), view.top_k)
        np.testing.assert_allclose(group_scores[chosen_rows(step, head)].sum(), group_scores[want].sum(), rtol=1e-5)


@pytest.mark.parametrize("num_components", [1, 4, 16])
def test_sparq_selection_and_rest_equal_their_definition(context_len, group_size, num_components) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    selector = PreparedSparq(layer, num_components).selector(view)
    tail = make_tail(NUM_STEPS, group_size)
    for head, q, keys, step in steps(selector, layer, view, group_size):
        logits = definitions.sparq_logits(q, keys, num_components)
        rows = definitions.best_rows(logits.sum(0), resident_rows(view), view.top_k)
        assert chosen_rows(step, head) == rows
        whole = np.concatenate([keys, step.recent[head, :, 0].double().numpy()])
        attended = [*resident_rows(view), *rows, *range(len(keys), len(whole))]
        mine = slice(head * group_size, (head + 1) * group_size)
        for g, of_head in enumerate(definitions.sparq_logits(q, whole, num_components)):
            share = 1 - definitions.softmax(of_head)[attended].sum()
            np.testing.assert_allclose(step.chosen.rest.share[mine][g], share, atol=1e-5)
        num_seen = len(whole) - context_len
        values = torch.cat([layer.values[head], tail.kv[head, :num_seen, 1]])
        np.testing.assert_allclose(step.chosen.rest.out[mine], values.mean(0).expand(group_size, -1), atol=1e-5)


@pytest.mark.parametrize(("num_subspaces", "num_centroids"), [(1, 2), (2, 16), (4, 256)])
def test_pqcache_selection_equals_its_definition(context_len, group_size, num_subspaces, num_centroids) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    prepared = PreparedPqcache(layer, num_subspaces, num_centroids)
    for head, q, keys, step in steps(prepared.selector(view), layer, view, group_size):
        group_scores = definitions.pqcache_group_scores(q, keys, prepared.centroids[head].double().numpy())
        want = definitions.best_rows(group_scores, resident_rows(view), view.top_k)  # rows with equal codes tie
        np.testing.assert_allclose(group_scores[chosen_rows(step, head)].sum(), group_scores[want].sum(), rtol=1e-5)


@pytest.mark.parametrize(("num_bits", "num_tables"), [(1, 2), (4, 10), (10, 150)])
def test_magicpig_selection_and_weights_equal_their_definition(context_len, group_size, num_bits, num_tables) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    prepared = PreparedMagicpig(layer, num_bits, num_tables)
    projections = prepared.projections.double().numpy()
    for head, q, keys, step in steps(prepared.selector(view), layer, view, group_size):
        mean = keys[:context_len].mean(0)
        for g, query in enumerate(q):
            q_head = head * group_size + g
            want = definitions.magicpig_rows(query, keys, mean, projections, num_tables)
            want = {row: chance for row, chance in want.items() if row not in resident_rows(view)}
            assert chosen_rows(step, q_head) == list(want)
            got = step.chosen.log_weights[q_head, : len(want)]
            np.testing.assert_allclose(got, -np.log(list(want.values())), rtol=1e-3, atol=1e-4)


def test_h2o_selection_equals_its_definition(context_len, group_size) -> None:
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    received = layer.attention_received().view(NUM_KV_HEADS, group_size, -1).double().sum(1).numpy()
    books = [
        definitions.HeavyHitters(keys.double().numpy(), of_head, resident_rows(view), view.top_k)
        for keys, of_head in zip(layer.keys, received, strict=True)
    ]
    tail, num_left = make_tail(NUM_STEPS, group_size), 0
    for book, keys in zip(books, tail.kv[:, :, 0].double().numpy(), strict=True):
        book.keys += list(keys)
    for head, q, keys, step in steps(PreparedH2o(layer).selector(view), layer, view, group_size):
        for row in range(context_len + num_left, len(keys)) if head == 0 else ():
            for book in books:
                book.leave(row)
            num_left += 1
        recent = list(range(len(keys), len(keys) + step.recent.shape[1]))
        assert chosen_rows(step, head) == books[head].step(q, recent)
