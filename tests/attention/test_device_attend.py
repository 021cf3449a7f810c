"""Attention with its log-sum-exp on the device, by torch's fused kernels."""

import pytest
import torch
from torch import Tensor

from csattn.attention import attend, attend_chunk, reference

SCALE = 0.25
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def make(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 2, num_rows, head_dim, device="cuda").to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("q_len", "kv_len", "head_dim"), [(1, 1, 64), (33, 257, 128), (130, 1001, 64), (7, 50, 12)])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_on_the_device_equals_the_definition(
    q_len: int, kv_len: int, head_dim: int, masked: bool, dtype: torch.dtype
) -> None:
    q, k, v = make(q_len, head_dim, dtype), make(kv_len, head_dim, dtype), make(kv_len, head_dim, dtype)
    mask = torch.rand(q_len, kv_len, device="cuda") < 0.3 if masked else None
    if mask is not None:
        mask[q_len // 2] = False  # this query sees no row
    out, lse = attend(q, k, v, SCALE, mask)
    want_out, want_lse = reference.attend(q, k, v, SCALE, mask)
    torch.testing.assert_close(out, want_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("past", "chunk_len"), [(0, 17), (300, 64), (301, 77)])
def test_chunked_attention_on_the_device_is_causal_attention_over_all_rows(past: int, chunk_len: int) -> None:
    kv = torch.randn(2, past + chunk_len, 2, 64, device="cuda").half()
    q = torch.randn(6, chunk_len, 64, device="cuda").half()
    out = attend_chunk(q, kv[:, :, 0], kv[:, :, 1], SCALE)
    mask = torch.ones(chunk_len, past + chunk_len, dtype=torch.bool, device="cuda").tril(past)
    k, v = (kv[:, :, i].repeat_interleave(3, dim=0)[None] for i in (0, 1))
    want, _ = reference.attend(q[None], k, v, SCALE, mask)
    torch.testing.assert_close(out, want[0], rtol=3e-3, atol=3e-3)
