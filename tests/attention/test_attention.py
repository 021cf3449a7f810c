"""Attention with its log-sum-exp, chunked causal attention, and the merge of disjoint row sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csattn.attention import attend, attend_chunk, merge_state, reference

SCALE = 0.25


def make(num_heads: int, num_rows: int, head_dim: int, seed: int = 0) -> Tensor:
    return torch.randn(1, num_heads, num_rows, head_dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_len", [0, 1, 31, 32, 33, 257])
@pytest.mark.parametrize(("q_len", "head_dim"), [(1, 64), (7, 60), (33, 16)])
def test_attend_equals_the_definition(kv_len: int, q_len: int, head_dim: int) -> None:
    q, k, v = make(3, q_len, head_dim, 1), make(3, kv_len, head_dim, 2), make(3, kv_len, head_dim, 3)
    out, lse = attend(q, k, v, SCALE)
    want_out, want_lse = reference.attend(q, k, v, SCALE)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_attend_reads_rows_whose_keys_and_values_interleave() -> None:
    kv = torch.randn(2, 50, 2, 16)
    q = make(2, 3, 16)
    out, _ = attend(q, kv[None, :, :, 0], kv[None, :, :, 1], SCALE)
    want, _ = reference.attend(q, kv[None, :, :, 0], kv[None, :, :, 1], SCALE)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_masked_rows_do_not_contribute() -> None:
    q, k, v = make(2, 4, 16, 1), make(2, 40, 16, 2), make(2, 40, 16, 3)
    mask = torch.zeros(4, 40, dtype=torch.bool)
    mask[:, ::3] = True
    out, lse = attend(q, k, v, SCALE, mask)
    want_out, want_lse = reference.attend(q, k[:, :, ::3], v[:, :, ::3], SCALE)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_log_weights_are_added_to_logits(masked: bool) -> None:
    """A row with a log weight of log 3 counts as three copies of it."""
    q, k, v = make(2, 4, 16, 1), make(2, 41, 16, 2), make(2, 41, 16, 3)
    weights = torch.zeros(2, 1, 41)
    weights[:, :, ::2] = torch.tensor(3.0).log()
    mask = torch.arange(41) % 3 > 0 if masked else None
    out, lse = attend(q, k, v, SCALE, None if mask is None else mask.expand(4, 41), weights)
    rows = [row for row in range(41) for _ in range(1 if row % 2 else 3) if mask is None or mask[row]]
    want_out, want_lse = reference.attend(q, k[:, :, rows], v[:, :, rows], SCALE)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_no_row_gets_zeros_and_minus_infinity() -> None:
    q, k, v = make(2, 4, 16, 1), make(2, 40, 16, 2), make(2, 40, 16, 3)
    mask = torch.ones(4, 40, dtype=torch.bool)
    mask[2] = False
    out, lse = attend(q, k, v, SCALE, mask)
    want_out, want_lse = reference.attend(q, k, v, SCALE, mask)
    assert torch.isneginf(lse[:, :, 2]).all()
    assert not out[:, :, 2].any()
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_nan_query_gets_nan_and_affects_no_other(cap: float | None) -> None:
    q, k, v = make(2, 4, 16, 1), make(2, 40, 16, 2), make(2, 40, 16, 3)
    q[0, 1, 2, 5] = torch.nan
    for out, lse in (attend(q, k, v, SCALE, logit_cap=cap), reference.attend(q, k, v, SCALE, logit_cap=cap)):
        assert torch.equal(out.isnan().all(-1), q.isnan().any(-1)) and torch.equal(lse.isnan(), q.isnan().any(-1))


@pytest.mark.parametrize(("past", "chunk_len"), [(0, 1), (0, 17), (1, 1), (40, 1), (40, 9), (3, 64)])
@pytest.mark.parametrize("group_size", [1, 3])
def test_chunked_attention_is_causal_attention_over_all_rows(past: int, chunk_len: int, group_size: int) -> None:
    kv_len = past + chunk_len
    k, v = make(2, kv_len, 16, 2)[0], make(2, kv_len, 16, 3)[0]
    q = make(2 * group_size, chunk_len, 16, 1)[0]
    out = attend_chunk(q, k, v, SCALE)
    mask = torch.ones(chunk_len, kv_len, dtype=torch.bool).tril(past)
    repeated = (x.repeat_interleave(group_size, dim=0)[None] for x in (k, v))
    want, _ = reference.attend(q[None], *repeated, SCALE, mask)
    torch.testing.assert_close(out, want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_len", [0, 9])
def test_attention_of_an_empty_chunk_is_empty(kv_len: int) -> None:
    rows = torch.randn(2, kv_len, 16)
    assert attend_chunk(torch.randn(4, 0, 16), rows, rows, SCALE).shape == (4, 0, 16)


@given(sizes=st.lists(st.integers(0, 20), min_size=2, max_size=5).filter(any), seed=st.integers(0, 1000))
def test_merging_parts_in_any_order_gives_attention_over_all_rows(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, 2, sum(sizes), 8, generator=generator) * 3 for _ in range(2))
    q = torch.randn(1, 2, 3, 8, generator=generator)
    want_out, want_lse = reference.attend(q, k, v, SCALE)
    parts = [reference.attend(q, *kv, SCALE) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    for ordered in (parts, parts[::-1]):
        filled = [part for part in ordered if torch.isfinite(part[1]).all()]
        empty = [part for part in ordered if not torch.isfinite(part[1]).all()]
        out, lse = filled[0]
        for part in filled[1:] + empty:
            out, lse = merge_state(out, lse, *part)
        torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_merging_with_an_empty_side_changes_nothing() -> None:
    q, k, v = make(2, 3, 16, 1), make(2, 20, 16, 2), make(2, 20, 16, 3)
    side = attend(q, k, v, SCALE)
    nothing = attend(q, k[:, :, :0], v[:, :, :0], SCALE)
    for merged in (merge_state(*side, *nothing), merge_state(*nothing, *side)):
        assert torch.equal(merged[0], side[0])
        assert torch.equal(merged[1], side[1])
