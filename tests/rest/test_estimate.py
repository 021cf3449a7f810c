"""The estimate of rows that were not read agrees with its definition, and with attention if its assumptions hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csattn.errors import ConfigError
from csattn.rest import Moments, estimate_rest, moments_of, reference
from csattn.rest.device import moment_table, moments_shape

HEAD_DIM, SCALE = 16, 0.25


def normal_rows(num_rows: int, num_kv_heads: int = 2, seed: int = 0) -> torch.Tensor:
    """Return keys and values [num_kv_heads, num_rows, 2, d]: jointly normal, neither centred nor independent."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_kv_heads, num_rows, 2 * HEAD_DIM, generator=generator)
    mixed = mixed @ (torch.randn(num_kv_heads, 2 * HEAD_DIM, 2 * HEAD_DIM, generator=generator) / 6)
    offset = 2 * torch.randn(num_kv_heads, 1, 2 * HEAD_DIM, generator=generator)
    return (mixed + offset).view(num_kv_heads, num_rows, 2, HEAD_DIM)


def queries(num_tokens: int, num_q_heads: int, size: float = 1.0, seed: int = 1) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(num_tokens, num_q_heads, HEAD_DIM, generator=generator).numpy()


@pytest.mark.parametrize("size", [0.0, 0.3, 3.0, 100.0])
@pytest.mark.parametrize("num_index_heads", [2, 6])
@settings(max_examples=20)
@given(st.integers(1, 90), st.lists(st.integers(0, 90), min_size=6, max_size=6))
def test_estimate_rest_agrees_with_the_definition(size, num_index_heads, num_rows, chosen) -> None:
    """This holds for 0, some or all rows chosen, for queries of zeros and for queries that see a single key."""
    moments = moments_of([normal_rows(50)])
    q = queries(2, 6, size)
    num_chosen = np.minimum(np.array(chosen, np.int32)[:num_index_heads], num_rows)
    num_chosen = np.stack([num_chosen, num_chosen[::-1]]).astype(np.int32)
    rows = np.array([num_rows, num_rows + 3], np.int64)
    out, lse = estimate_rest(q, moments, num_chosen, rows, SCALE)
    want_out, want_lse = reference.estimate_rest(q, moments, num_chosen, rows, SCALE)
    np.testing.assert_allclose(out, want_out, rtol=1e-4, atol=1e-4 * max(1.0, size))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-4)
    nothing_left = np.repeat(num_chosen >= rows[:, None], 6 // num_index_heads, axis=1)
    np.testing.assert_array_equal(np.isneginf(lse), nothing_left)
    assert not out[nothing_left].any()


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.05, 0.5])
def test_the_estimate_over_normal_rows_is_close_to_attention_to_the_rows_not_chosen(keep) -> None:
    kv = normal_rows(200_000, num_kv_heads=1)
    q = queries(4, 1, size=1.5)
    keys, values = kv[0].double().unbind(1)
    num_chosen = round(keep * len(keys))
    got_out, got_lse = estimate_rest(
        q, moments_of([kv]), np.full((4, 1), num_chosen, np.int32), np.full(4, len(keys)), SCALE
    )
    for token in range(4):
        logits = SCALE * (keys @ torch.from_numpy(q[token, 0]).double())
        left = logits.argsort(descending=True)[num_chosen:]
        weights = logits[left].softmax(0)
        assert got_lse[token, 0] == pytest.approx(float(logits[left].logsumexp(0)), abs=0.02)
        np.testing.assert_allclose(got_out[token, 0], weights @ values[left], atol=0.05)


def test_pieces_and_dtypes_do_not_change_the_moments() -> None:
    kv = normal_rows(1000) + 50  # a mean far from zero, like that of a model's keys
    flat = kv.double().flatten(2)
    moments = moments_of([kv])
    for got in (moments, moments_of(kv.split(7, dim=1)), moments_of([kv[:, :1], kv[:, 1:]])):
        np.testing.assert_allclose(got.key_mean, flat[..., :HEAD_DIM].mean(1), rtol=1e-5)
        np.testing.assert_allclose(got.value_mean, flat[..., HEAD_DIM:].mean(1), rtol=1e-5)
        for head in range(2):
            want = flat[head].T.cov(correction=0)[:HEAD_DIM]
            np.testing.assert_allclose(got.key_cov[head], want[:, :HEAD_DIM], atol=2e-4)
            np.testing.assert_allclose(got.cross_cov[head], want[:, HEAD_DIM:], atol=2e-4)
    in_halves = moments_of([kv.bfloat16()])
    np.testing.assert_array_equal(in_halves.key_cov, moments_of([kv.bfloat16().float()]).key_cov)
    assert moments.table.nbytes == 2 * 4 * (2 * HEAD_DIM + 2 * HEAD_DIM**2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
def test_moment_table_holds_the_moments_in_units_of_logits(dtype, tolerance) -> None:
    moments = moments_of([normal_rows(300)])
    table = moment_table(moments, SCALE, dtype)
    assert table.dtype == dtype and table.shape == moments_shape(2, HEAD_DIM)
    means, (key_cov, cross_cov) = table[:, :2].float().sum(1), table[:, 2:].float().unbind(2)
    np.testing.assert_allclose(means[:, 0], SCALE * moments.key_mean, rtol=tolerance**2, atol=1e-6)
    np.testing.assert_allclose(means[:, 1], moments.value_mean, rtol=tolerance**2, atol=1e-6)
    np.testing.assert_allclose(key_cov, SCALE**2 * moments.key_cov, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(cross_cov.transpose(1, 2), SCALE * moments.cross_cov, rtol=tolerance, atol=1e-6)


def test_moments_that_a_dtype_cannot_hold_are_refused() -> None:
    kv = 4000 * normal_rows(300).half()
    assert kv.isfinite().all()
    with pytest.raises(ConfigError, match=r"too large for torch\.float16; choose bfloat16"):
        moment_table(moments_of([kv]), SCALE, torch.float16)
    moment_table(moments_of([kv]), SCALE, torch.bfloat16)


def test_moments_of_one_row_have_no_covariance_and_estimate_that_row() -> None:
    kv = normal_rows(1)
    moments = moments_of([kv])
    assert isinstance(moments, Moments) and not moments.key_cov.any() and not moments.cross_cov.any()
    q = queries(1, 2)
    out, lse = estimate_rest(q, moments, np.zeros((1, 2), np.int32), np.ones(1, np.int64), SCALE)
    np.testing.assert_allclose(out[0], kv[:, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0], SCALE * (q[0] * kv[:, 0, 0].numpy()).sum(-1), rtol=1e-5)


def test_the_estimate_of_a_token_is_independent_of_other_tokens() -> None:
    moments, q = moments_of([normal_rows(50)]), queries(5, 6)
    chosen, rows = np.arange(10, dtype=np.int32).reshape(5, 2), np.arange(20, 25)
    out, lse = estimate_rest(q, moments, chosen, rows, SCALE)
    for i in range(5):
        alone = estimate_rest(q[i : i + 1], moments, chosen[i : i + 1], rows[i : i + 1], SCALE)
        np.testing.assert_array_equal(alone[0][0], out[i])
        np.testing.assert_array_equal(alone[1][0], lse[i])
