"""The rivals' CPU kernels choose and attend as their selectors are defined."""

import numpy as np
import pytest
import torch

from bench.decode.rivals import best_rows
from bench.decode.rivals.magicpig import SampledAttention
from bench.decode.rivals.pqcache import PqSearch
from bench.decode.rivals.sparq import SparqSearch
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.sparq import PreparedSparq
from tests.bench_rivals.layers import (
    HEAD_DIM,
    NUM_KV_HEADS,
    SCALE,
    assert_best_by_codes,
    bits_of,
    give_room,
    make_layer,
    make_queries,
    make_view,
)


@pytest.mark.parametrize(("context_len", "keep"), [(40, 0.3), (3000, 0.05), (20_011, 0.05)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_rows_are_chosen_and_of_equal_ones_the_first(team, rng, context_len, keep, ties):
    told, view = best_rows.Told(best_rows.CHOICE), make_view(context_len, keep)
    best_rows.tell_choice(told, NUM_KV_HEADS, 1, context_len, view.middle, view.top_k)
    give_room(told, view.top_k)
    tape = best_rows.Tape()
    best_rows.add_choice(tape, told, NUM_KV_HEADS, context_len)
    high = 5 if ties else 2**31 - 1
    worth = rng.integers(-high, high, (NUM_KV_HEADS, context_len)).astype(np.int32)
    told["worth"][:] = 2**31 - 1  # behind the keys: must not be chosen
    told["worth"][:, :context_len] = worth
    team.run(tape)
    for head in range(NUM_KV_HEADS):
        middle = np.arange(view.middle.start, view.middle.stop)
        order = middle[np.argsort(-worth[head, middle].astype(np.int64), kind="stable")]
        want = np.sort(order[: view.top_k])
        assert told["valid_len"][head] == len(want)
        np.testing.assert_array_equal(told["kv_indices"][head, : len(want)], want)


def test_a_sample_that_misleads_changes_nothing(team):
    """Every sampled key is among the best, so that the first guess is far too high."""
    context_len, top_k = 40_000, 4000
    told = best_rows.Told(best_rows.CHOICE)
    best_rows.tell_choice(told, NUM_KV_HEADS, 1, context_len, slice(0, context_len), top_k)
    give_room(told, top_k)
    tape = best_rows.Tape()
    best_rows.add_choice(tape, told, NUM_KV_HEADS, context_len)
    worth = np.zeros(context_len, np.int32)
    worth[:: context_len // best_rows.SAMPLE] = 1000
    told["worth"][:, :context_len] = worth
    team.run(tape)
    want = np.sort(np.argsort(-worth, kind="stable")[:top_k])
    np.testing.assert_array_equal(told["kv_indices"], np.stack([want] * NUM_KV_HEADS))


@pytest.mark.parametrize(("context_len", "group_size"), [(37, 3), (500, 1), (9001, 4), (700, 7)])
def test_pqcache_chooses_as_defined(team, context_len, group_size):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    prepared = PreparedPqcache(layer, num_centroids=16, num_iterations=2)
    shape, (_, num_subspaces, num_centroids, _) = (NUM_KV_HEADS, group_size, HEAD_DIM), prepared.centroids.shape
    search = PqSearch(shape, context_len, view.middle, view.top_k, SCALE, num_subspaces, num_centroids)
    give_room(search.told, view.top_k)
    search.told["q"] = q.numpy()
    search.told["centroids"], search.told["codes"] = prepared.centroids.numpy(), prepared.codes.numpy()
    for _ in range(2):
        team.run(search.tape)
        assert_best_by_codes(prepared, view, q, search.told["kv_indices"], search.told["valid_len"])


@pytest.mark.parametrize(("context_len", "group_size", "tail_len"), [(37, 3, 1), (500, 1, 17), (9001, 4, 33)])
def test_sparq_chooses_and_estimates_as_defined(team, context_len, group_size, tail_len):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    recent = torch.randn(NUM_KV_HEADS, tail_len, 2, HEAD_DIM).bfloat16()
    prepared = PreparedSparq(layer, num_components=8)
    capacity = 48
    shape = NUM_KV_HEADS, group_size, HEAD_DIM
    search = SparqSearch(shape, context_len, view.middle, view.top_k, SCALE, 8, capacity)
    give_room(search.told, view.top_k)
    tail = torch.full((NUM_KV_HEADS, HEAD_DIM, capacity), torch.nan, dtype=torch.bfloat16)
    tail[:, :, :tail_len] = recent[:, :, 0].mT
    told = search.told
    told["q"], told["channels"], told["tail_channels"] = q.numpy(), bits_of(layer.keys.mT), bits_of(tail)
    told["tail_len"] = tail_len
    for _ in range(2):
        team.run(search.tape)
        want = prepared.selector(view).select(q.numpy(), recent)
        np.testing.assert_array_equal(told["valid_len"], want.valid_len)
        np.testing.assert_array_equal(told["kv_indices"], want.kv_indices)
        np.testing.assert_allclose(told["shares"].flatten(), want.rest.share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("context_len", "group_size"), [(40, 1), (700, 3), (9001, 4)])
def test_magicpig_attends_to_what_is_sampled_as_defined(team, context_len, group_size):
    layer, view, q = make_layer(context_len, group_size), make_view(context_len, 0.1), make_queries(group_size)
    prepared = PreparedMagicpig(layer, num_bits=6, num_tables=20)
    shape = NUM_KV_HEADS, group_size, HEAD_DIM
    sampled = SampledAttention(shape, context_len, view.middle, SCALE, 6, 20, team.num_threads)
    told = sampled.told
    kv = torch.stack([layer.keys, layer.values], dim=2).contiguous()
    told["q"], told["codes"], told["kv"] = q.numpy(), prepared.hash(q).contiguous().numpy(), bits_of(kv)
    told["rows"], told["starts"] = prepared.rows.numpy(), prepared.starts.numpy()
    told["key_mean"] = prepared.key_mean[:, 0].contiguous().numpy()
    told["norms"] = (layer.keys.float() - prepared.key_mean).norm(dim=-1).numpy()
    told["out"] = np.full((len(q), HEAD_DIM + 2), np.nan, np.float32)
    want = prepared.selector(view).select(q.numpy(), torch.empty(NUM_KV_HEADS, 0, 2, HEAD_DIM))
    for _ in range(2):  # the second finds counters that the first has cleared
        team.run(sampled.tape)
        for head in range(len(q)):
            rows = want.kv_indices[head, : want.valid_len[head]]
            num_sampled = told["num_sampled"][head]
            np.testing.assert_array_equal(np.sort(told["sampled"][head, :num_sampled]), rows)
            acc, (top, total) = np.split(told["out"][head], [HEAD_DIM])
            if len(rows) == 0:
                assert total == 0
                continue
            near = kv[head // group_size, torch.from_numpy(rows).long()].double()
            logits = near[:, 0] @ q[head].double() * SCALE + torch.from_numpy(want.log_weights[head, : len(rows)])
            np.testing.assert_allclose(acc / total, logits.softmax(0) @ near[:, 1], rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(top + np.log(total), logits.logsumexp(0), rtol=1e-3, atol=1e-3)
