"""Attention over pieces is attention over all rows, however they are cut, and needs no more memory for more of them."""

import pytest
import torch

from csattn.attention import reference
from workers.attend_rows import attend_pieces, attend_rows


def cut(rows: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    return list(rows.split(num_rows, dim=1)) if rows.shape[1] else []


def definition(q: torch.Tensor, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, every query head with a copy of its KV head's rows."""
    k, v = rows.repeat_interleave(q.shape[0] // rows.shape[0], dim=0).unbind(2)
    out, lse = reference.attend(q[None].double(), k[None].double(), v[None].double(), scale)
    return out[0], lse[0]


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 300])
@pytest.mark.parametrize("piece_rows", [1, 7, 64, 300])
def test_pieces_of_any_size_give_attention_over_all_rows(num_tokens, num_rows, piece_rows) -> None:
    q, rows = 3 * torch.randn(6, num_tokens, 16), torch.randn(2, num_rows, 2, 16)
    out, lse, counted = attend_pieces(q, cut(rows, piece_rows), 0.25)
    want_out, want_lse = definition(q, rows, 0.25)
    assert counted == num_rows
    torch.testing.assert_close(out, want_out.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_pieces_of_few_bits_are_as_exact_as_one(dtype) -> None:
    """They are merged in float32: rounding after each of 500 pieces would add up."""
    q, rows = torch.randn(4, 1, 32).to(dtype), torch.randn(2, 500, 2, 32).to(dtype)
    rows[..., 1, :] += 3
    want, _ = definition(q, rows, 0.2)
    whole, _ = attend_rows(q, rows, 0.2)
    out, _, _ = attend_pieces(q, cut(rows, 1), 0.2)
    assert (out - want).abs().max() <= (whole - want).abs().max()


def test_one_piece_is_attention_at_once_to_the_bit() -> None:
    q, rows = torch.randn(4, 2, 32).bfloat16(), torch.randn(2, 50, 2, 32).bfloat16()
    out, lse, _ = attend_pieces(q, [rows], 0.2)
    want_out, want_lse = attend_rows(q, rows, 0.2)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)


def test_without_rows_there_is_nothing() -> None:
    out, lse, num_rows = attend_pieces(torch.randn(4, 2, 8), [], 1.0)
    assert num_rows == 0
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_a_piece_may_be_overwritten_once_the_next_is_asked_for() -> None:
    rows, q = torch.randn(2, 60, 2, 8), torch.randn(4, 1, 8)
    buffer = torch.empty(2, 10, 2, 8)

    def pieces():
        for piece in cut(rows, 10):
            yield buffer.copy_(piece)
            buffer.fill_(torch.nan)

    out, lse, _ = attend_pieces(q, pieces(), 1.0)
    want_out, want_lse, _ = attend_pieces(q, cut(rows, 10), 1.0)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)
