"""Rows that a stream keeps: attention as defined, in memory that does not grow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.streaming import reference
from tests.workers.streaming.soundness import check
from workers.streaming.heavy_hitters import HeavyRows
from workers.streaming.places import Places
from workers.streaming.window import WindowRows

HEAD_DIM, SCALE = 8, 0.4
FREQUENCIES = 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


def make_rows(num_tokens, num_kv_heads=2, group_size=2, seed=0, spread=1.5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    heads = num_kv_heads * group_size, num_kv_heads, num_kv_heads
    return [(torch.randn(h, num_tokens, HEAD_DIM, generator=generator) * spread).to(dtype) for h in heads]


def poisoned(rows):
    """Fill memory that must not be read with NaN."""
    for value in vars(rows).values():
        if torch.is_tensor(value) and value.dtype != torch.float64:
            value.fill_(torch.nan)
    return rows


def window_rows(sink_len, window_len, block_len, like) -> WindowRows:
    places = Places(FREQUENCIES, max(sink_len + window_len, window_len - 1 + block_len))
    return poisoned(WindowRows(sink_len, window_len, block_len, like[:, :0], places))


def heavy_rows(heavy_len, window_len, like, block_len=16) -> HeavyRows:
    places = Places(FREQUENCIES, max(heavy_len + window_len, window_len - 1 + block_len))
    return poisoned(HeavyRows(heavy_len, window_len, block_len, like[:, :0], places))


def attend_in_parts(rows, q, k, v, sizes):
    outs = []
    for part_q, part_k, part_v in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
        rows.append(part_k, part_v)
        outs.append(rows.attend(part_q, SCALE))
        check(rows)
    return torch.cat(outs, dim=1)


def parts_of(num_tokens, seed):
    """Return random sizes of pieces, of num_tokens in all."""
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < num_tokens:
        sizes.append(min(int(rng.choice([1, 1, 1, 2, 7, 40])), num_tokens - sum(sizes)))
    return sizes


@pytest.mark.parametrize("sink_len, window_len", [(0, 1), (0, 7), (1, 1), (4, 1), (4, 12), (3, 200)])
@pytest.mark.parametrize("block_len", [1, 5, 64])
def test_window_rows_equal_the_reference_for_any_chunk_sizes(sink_len, window_len, block_len) -> None:
    q, k, v = make_rows(90)
    want = reference.window_attention(q, k, v, FREQUENCIES, SCALE, sink_len, window_len)
    for sizes in ([90], [1] * 90, parts_of(90, seed=block_len)):
        rows = window_rows(sink_len, window_len, block_len, k)
        torch.testing.assert_close(attend_in_parts(rows, q, k, v, sizes), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heavy_len, window_len", [(0, 1), (0, 6), (1, 1), (5, 1), (5, 11), (60, 60)])
@pytest.mark.parametrize("num_kv_heads, group_size", [(1, 1), (3, 2)])
def test_heavy_rows_equal_the_reference_for_any_chunk_sizes(heavy_len, window_len, num_kv_heads, group_size) -> None:
    q, k, v = make_rows(90, num_kv_heads, group_size)
    want, _ = reference.heavy_attention(q, k, v, FREQUENCIES, SCALE, heavy_len, window_len)
    for sizes in ([90], [1] * 90, parts_of(90, seed=heavy_len)):
        rows = heavy_rows(heavy_len, window_len, k)
        torch.testing.assert_close(attend_in_parts(rows, q, k, v, sizes), want, rtol=1e-4, atol=1e-5)


def tokens_kept(rows) -> list[list[int]]:
    """Return each head's tokens in the order of their places. A value's first number must be its token."""
    window = slice(max(0, rows._end - rows._window_len), rows._end)
    values = torch.cat([rows._heavy_v[:, : rows._num_heavy], rows._v[:, window]], dim=1)
    return values[:, :, 0].int().tolist()


@settings(max_examples=25)
@given(
    heavy_len=st.integers(0, 6),
    window_len=st.integers(1, 6),
    spread=st.sampled_from([0.3, 1.5, 60.0]),
    seed=st.integers(0, 1000),
)
def test_evicted_rows_equal_the_references(heavy_len, window_len, spread, seed) -> None:
    """With a spread of 60 most weights are exactly 0, so that rows tie: the oldest is evicted."""
    q, k, v = make_rows(40, 2, 2, seed, spread)
    v[:, :, 0] = torch.arange(40)
    _, seen = reference.heavy_attention(q, k, v, FREQUENCIES, SCALE, heavy_len, window_len)
    rows = heavy_rows(heavy_len, window_len, k)
    for token in range(40):
        one = slice(token, token + 1)
        rows.append(k[:, one], v[:, one])
        rows.attend(q[:, one], SCALE)
        assert tokens_kept(rows) == seen[token]


def test_with_equal_attention_the_oldest_rows_are_kept_as_heavy() -> None:
    """With equal attention, mass grows with age: the newest row outside the window has least."""
    q, k, v = make_rows(20, 1, 1)
    v[:, :, 0] = torch.arange(20)
    rows = heavy_rows(3, 4, k)
    attend_in_parts(rows, torch.zeros_like(q), k, v, [20])
    assert tokens_kept(rows) == [[0, 1, 2, 16, 17, 18, 19]]


def test_an_attended_row_is_kept_beyond_the_window() -> None:
    q, k, v = make_rows(60, 1, 1, spread=0.1)
    k[:, 5] = q[:, :] = torch.tensor([0.0, 0, 0, 6, 0, 0, 0, 0])  # the slowest dimension: RoPE hardly rotates it
    v[:, :, 0] = torch.arange(60)
    rows = heavy_rows(2, 6, k)
    attend_in_parts(rows, q, k, v, [60])
    assert 5 in tokens_kept(rows)[0]


def test_attention_mass_is_not_lost_to_rounding_after_millions_of_tokens() -> None:
    """A token gives each of four rows a quarter, which a float32 sum of 2 ** 24 would lose."""
    q, k, v = make_rows(5, 1, 1)
    rows = heavy_rows(3, 1, k)
    attend_in_parts(rows, torch.zeros_like(q)[:, :4], k[:, :4], v[:, :4], [4])
    rows._heavy_mass[:] = rows._window_mass[:] = 2.0**24
    attend_in_parts(rows, torch.zeros_like(q)[:, 4:], k[:, 4:], v[:, 4:], [1])
    assert rows._heavy_mass.tolist() == [3 * [2.0**24 + 0.25]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["window", "heavy"])
def test_half_precision_rows_are_close_to_the_reference(dtype, policy) -> None:
    q, k, v = make_rows(70, dtype=dtype)
    exact = [x.double() for x in (q, k, v)]
    if policy == "window":
        want = reference.window_attention(*exact, FREQUENCIES, SCALE, 4, 12)
        rows = window_rows(4, 12, 16, k)
    else:
        want, _ = reference.heavy_attention(*exact, FREQUENCIES, SCALE, 4, 12)
        rows = heavy_rows(4, 12, k)
    got = attend_in_parts(rows, q, k, v, parts_of(70, seed=1))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("policy", ["window", "heavy"])
def test_products_of_queries_and_keys_may_exceed_float16(policy) -> None:
    q, k, v = make_rows(50, spread=200.0, dtype=torch.float16)
    rows = window_rows(4, 12, 16, k) if policy == "window" else heavy_rows(5, 12, k)
    assert attend_in_parts(rows, q, k, v, [40, 10]).isfinite().all()


@pytest.mark.parametrize("policy", ["window", "heavy"])
def test_memory_and_positions_stay_bounded(policy) -> None:
    """The table has as many places as rows are kept; a place beyond it would be an IndexError."""
    q, k, v = make_rows(1500, 1, 1)
    rows = window_rows(4, 28, 1, k) if policy == "window" else heavy_rows(16, 16, k, block_len=1)
    attend_in_parts(rows, q[:, :100], k[:, :100], v[:, :100], [1] * 100)
    storage, num_bytes = rows._k.data_ptr(), rows.num_bytes
    attend_in_parts(rows, q[:, 100:], k[:, 100:], v[:, 100:], parts_of(1400, seed=0))
    assert rows.kv_len == 1500
    assert (rows._k.data_ptr(), rows.num_bytes) == (storage, num_bytes)
    assert str(num_bytes) in repr(rows)


@pytest.mark.parametrize("places", [slice(2, 5), torch.tensor([2, 3, 4]), torch.tensor([[2, 3, 4], [2, 3, 4]])])
def test_places_rotate_like_rope_at_that_position(places) -> None:
    k = make_rows(3)[1]
    half = HEAD_DIM // 2
    pairs = torch.complex(k[..., :half].double(), k[..., half:].double())
    turned = pairs * torch.polar(torch.ones(3, half).double(), torch.outer(torch.arange(2.0, 5), FREQUENCIES).double())
    want = torch.cat([turned.real, turned.imag], dim=-1).float()
    torch.testing.assert_close(Places(FREQUENCIES, 6).rotate(k, places), want, rtol=1e-5, atol=1e-6)
