"""Tables against their definition: every centroid's score of every key, quantised or cut to the best."""

import numpy as np
import pytest
import torch

from csattn.table.rows import unpack_codes
from index_build import reference
from index_build.scales import _exact_moments, row_scales
from index_build.tables import top_l, top_l_sorted
from tests.index_build.tables import (
    centroids_and_keys,
    list_table,
    row_table,
    rows_by_definition,
    scores_by_definition,
)

# one below, at and above a block of 64, the block of the kernel (1024), and primes
CONTEXT_LENS = [1, 63, 64, 65, 331, 1023, 1024, 1025, 2111]


@pytest.mark.parametrize("score_bits", [4, 8])
@pytest.mark.parametrize("context_len", CONTEXT_LENS)
@pytest.mark.parametrize("subspace_dim", [1, 4, 8])
def test_rows_are_their_definition_to_the_bit(
    score_bits: int, context_len: int, subspace_dim: int, rng: np.random.Generator
) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 3, 5, subspace_dim, context_len)
    codes, scales = row_table(codebooks, keys, score_bits)
    assert torch.equal(codes, rows_by_definition(codebooks, keys, scales, score_bits))


@pytest.mark.parametrize("score_bits", [4, 8])
@pytest.mark.parametrize("context_len", [1, 65, 331])
def test_rows_hold_every_score_to_half_a_step(score_bits: int, context_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 3, 5, 4, context_len)
    codes, scales = row_table(codebooks, keys, score_bits)
    largest_code = 127 if score_bits == 8 else 7
    got = unpack_codes(codes.numpy(), context_len).astype(np.float64)
    scale = scales.numpy()[..., None].astype(np.float64)
    for head in range(2):
        for b in range(3):
            part = keys[head].view(3, 4, -1)[b]
            want = codebooks[head, b].double().numpy() @ part.double().numpy()
            inside = np.abs(want) <= scale[head, b] * largest_code
            assert (np.abs(got[head, b] * scale[head, b] - want)[inside] <= 0.50005 * scale[head, b].max()).all()
            assert (np.abs(got[head, b])[~inside] == largest_code).all()


def test_the_scale_of_4_bits_is_four_deviations_about_the_mean(rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 3, 5, 4, 3000)
    keys[1] += 2.0
    _, scales = row_table(codebooks, keys, 4)
    scores = scores_by_definition(codebooks, keys).double()
    limit = 4 * scores.std(-1, correction=0) + scores.mean(-1).abs()
    torch.testing.assert_close(scales * 7, limit.minimum(scores.abs().amax(-1)).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("context_len", [300, 4999, 100_003])
def test_moments_do_not_depend_on_the_order_of_the_keys(context_len: int, rng: np.random.Generator) -> None:
    """Which is why scales are the same to the bit wherever and however they are summed."""
    keys = torch.from_numpy(rng.standard_normal((3, 8, context_len)) * rng.uniform(0.01, 100, (3, 1, 1))).float()
    keys[2] = 0.0
    moments = [_exact_moments(some) for some in (keys, keys[:, :, torch.from_numpy(rng.permutation(context_len))])]
    for got, again in zip(*moments, strict=True):
        assert torch.equal(got, again)
    covariance = keys[0].double().cov(correction=0)
    torch.testing.assert_close(moments[0][1][0], covariance, rtol=1e-4, atol=1e-6 * float(covariance.max()))


def test_scales_of_many_parts_are_those_of_each(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 3, 5, 4, 100)
    arguments = (codebooks.flatten(0, 1), keys.view(6, 4, -1), torch.full((6, 5), torch.inf), 4)
    whole = row_scales(*arguments)
    monkeypatch.setattr("index_build.scales._WIDE_ELEMENTS", 1)
    assert torch.equal(row_scales(*arguments), whole)


def test_outliers_are_clipped_with_4_bits_only() -> None:
    keys = torch.randn(1, 1, 10_000)
    keys[0, 0, 0] = 1000.0
    codebooks = torch.ones(1, 1, 1, 1)
    _, fine = row_table(codebooks, keys, 8)
    codes, coarse = row_table(codebooks, keys, 4)
    assert fine.item() * 127 == pytest.approx(1000.0)
    assert coarse.item() * 7 < 100.0
    assert unpack_codes(codes.numpy(), 10_000)[0, 0, 0, 0] == 7


@pytest.mark.parametrize("score_bits", [4, 8])
def test_a_row_of_zeros_has_scale_zero_and_codes_zero(score_bits: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 1, 2, 3, 4, 50)
    codes, scales = row_table(codebooks, keys, score_bits)
    assert not scales[0, 1].any()
    assert not unpack_codes(codes.numpy(), 50)[0, 1].any()


def test_ties_between_two_codes_go_to_the_even_one() -> None:
    scores = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0]])
    assert reference.quantise_rows(scores, torch.ones(1), 127).tolist() == [[0, 2, 2, 0, -2, -2, 127]]
    codes, scales = row_table(torch.ones(1, 1, 1, 1), scores[None], 8)
    assert scales.item() == 1.0
    assert codes[0, 0, 0, :7].tolist() == [0, 2, 2, 0, -2, -2, 127]


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64)])
def test_top_l_is_sorted_by_score_then_index(num_keys: int, list_len: int, rng: np.random.Generator) -> None:
    rows = rng.integers(-4, 5, (6, num_keys)).astype(np.float32)  # many ties
    indices, scores = top_l(rows, list_len)
    for row, got, got_scores in zip(rows, indices, scores, strict=True):
        want = sorted(range(num_keys), key=lambda i: (-row[i], i))[:list_len]
        assert got.tolist() == want
        assert got_scores.tolist() == row[want].tolist()


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64)])
def test_top_l_in_torch_is_top_l(num_keys: int, list_len: int, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((6, num_keys)).astype(np.float32)
    rows[0], rows[1, ::2], rows[2, ::3] = 0.0, -0.0, 1e9
    rows[3] = rng.integers(-4, 5, num_keys)
    rows[4] *= 1e-7
    for got, want in zip(top_l_sorted(torch.from_numpy(rows), list_len), top_l(rows, list_len), strict=True):
        assert got.numpy().dtype == want.dtype
        assert got.numpy().tobytes() == want.tobytes()


def test_top_l_stores_no_negative_zero_and_no_infinity() -> None:
    _, scores = top_l(np.array([[-0.0, 1e-9, -1e-9, 1e9, -1e9]], dtype=np.float32), 5)
    assert np.isfinite(scores).all()
    assert not (scores.view(np.uint16) == 0x8000).any()


@pytest.mark.parametrize("context_len", [40, 1023, 1025])
def test_lists_hold_the_best_keys_of_each_centroid(context_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 2, 5, 4, context_len)
    indices, scores = list_table(codebooks, keys, 25)
    wanted = scores_by_definition(codebooks, keys)
    for head in range(2):
        for b in range(2):
            want_indices, want_scores = top_l(wanted[head, b].numpy(), 25)
            np.testing.assert_array_equal(indices[head, b].numpy(), want_indices)
            np.testing.assert_array_equal(scores[head, b].numpy(), want_scores)
