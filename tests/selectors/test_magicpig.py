"""MagicPIG samples rows with the stated probability, and its weighted samples are unbiased."""

import numpy as np
import pytest
import torch

from csattn.selectors.magicpig import PreparedMagicpig, sampling_probability
from tests.selectors.requests import SCALE, make_layer, make_tail, make_view


@pytest.mark.parametrize(("num_bits", "num_tables"), [(1, 2), (4, 10), (10, 150), (14, 300)])
def test_the_sampling_probability_is_that_of_at_least_two_collisions(num_bits, num_tables) -> None:
    cosines = torch.linspace(-1, 1, 101)
    meets = (1 - np.arccos(cosines.double().numpy()) / np.pi) ** num_bits
    none, one = (1 - meets) ** num_tables, num_tables * meets * (1 - meets) ** (num_tables - 1)
    got = sampling_probability(cosines, num_bits, num_tables).numpy()
    np.testing.assert_allclose(got, 1 - none - one, rtol=1e-6, atol=1e-12)
    assert (got > 0).all()
    assert (np.diff(got) >= 0).all()


def test_small_sampling_probabilities_keep_their_precision() -> None:
    """Small P keeps its precision where 1 - P rounds to 1: to first order P = L (L - 1) / 2 p², p for one table."""
    cosines = torch.cos(torch.pi * (1 - torch.tensor([1e-3, 1e-2, 0.03], dtype=torch.float64)))
    got = sampling_probability(cosines, 4, 50)
    first_order = 50 * 49 / 2 * torch.tensor([1e-12, 1e-8, 0.03**4], dtype=torch.float64) ** 2
    torch.testing.assert_close(got, first_order, rtol=1e-3, atol=0)


def test_weighted_samples_estimate_the_softmax_without_bias() -> None:
    """Over many draws of the projections, the sums of weights and of weighted values are right for every query head."""
    num_draws, context_len, group_size = 500, 60, 2
    layer, view = make_layer(context_len, group_size), make_view(context_len)
    q = 0.5 * make_tail(1, group_size).q[0]
    recent = make_tail(1, group_size).kv
    middle = slice(view.middle.start, view.middle.stop)
    kv_head = torch.arange(len(q)) // group_size
    powers = (SCALE * (layer.keys[kv_head, middle].double() @ q[:, :, None].double())[..., 0]).exp()
    wanted = torch.cat([powers[..., None], powers[..., None] * layer.values[kv_head, middle]], dim=2).sum(1)

    draws = torch.zeros(num_draws, *wanted.shape, dtype=torch.float64)
    for seed in range(num_draws):
        chosen = PreparedMagicpig(layer, 3, 8, seed).selector(view).select(q.numpy(), recent)
        for head, valid in enumerate(chosen.valid_len):
            rows = torch.from_numpy(chosen.kv_indices[head, :valid]).long()
            weights = torch.from_numpy(chosen.log_weights[head, :valid]).double().exp()
            weighed = weights * powers[head, rows - middle.start]
            draws[seed, head, 0] = weighed.sum()
            draws[seed, head, 1:] = weighed @ layer.values[kv_head[head], rows].double()
    standard_error = draws.std(0) / num_draws**0.5
    off = ((draws.mean(0) - wanted) / standard_error).abs()
    assert off.max() < 4.5, "68 sums, each within 4.5 standard errors of what it estimates"
    assert (off < 2).double().mean() > 0.85
    assert (draws.std(0) > 0.02 * draws.mean(0).abs()).all(), "samples that vary: the test can fail"


def test_search_bytes_count_the_rows_in_the_queries_buckets() -> None:
    """A step reads 4 bytes per row number in the buckets that the query heads fall into, and the projections."""
    layer, view = make_layer(70), make_view(70)
    prepared = PreparedMagicpig(layer, 4, 10)
    selector, q = prepared.selector(view), make_tail(1).q[0]
    selector.select(q.numpy(), make_tail(1).kv)
    codes = prepared.hash(layer.keys - layer.keys.mean(1, keepdim=True))
    num_met = sum(int((codes[head // 3] == of_head).sum()) for head, of_head in enumerate(prepared.hash(q)))
    assert selector.search_bytes == 4 * 16 * 40 + 4 * num_met
    assert prepared.index_bytes == 4 * 2 * (10 * (70 + 17) + 70)


def test_tables_hold_every_key_once_in_the_bucket_of_its_code() -> None:
    layer = make_layer(70)
    prepared = PreparedMagicpig(layer, 4, 10)
    codes = prepared.hash(layer.keys - layer.keys.mean(1, keepdim=True))
    for head, table in np.ndindex(2, 10):
        rows, starts = prepared.rows[head, table], prepared.starts[head, table].tolist()
        assert sorted(rows.tolist()) == list(range(70))
        for code in range(16):
            bucket = rows[starts[code] : starts[code + 1]]
            assert (codes[head, bucket.long(), table] == code).all()
