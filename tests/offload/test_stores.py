"""Stores return rows as they were stored."""

import pytest
import torch

from offload.host_store import HostStore


@pytest.mark.parametrize("num_index_heads", [2, 4, 6])
@pytest.mark.parametrize("leading", [(), (3,)])
def test_gather_takes_each_heads_own_rows(num_index_heads: int, leading: tuple[int, ...]) -> None:
    kv = torch.arange(2 * 50 * 2 * 4, dtype=torch.float32).view(2, 50, 2, 4)
    store = HostStore([torch.zeros_like(kv), kv])
    indices = torch.randint(0, 50, (*leading, num_index_heads, 7))
    rows = store.gather(1, indices)
    assert rows.shape == (*leading, num_index_heads, 7, 2, 4)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape)).tolist():
        head = place[-2] // (num_index_heads // 2)
        assert torch.equal(rows[tuple(place)], kv[head, indices[tuple(place)]])


def test_padding_is_clamped_into_the_context() -> None:
    kv = torch.randn(1, 5, 2, 4)
    assert torch.equal(HostStore([kv]).gather(0, torch.tensor([[-1, 99]])), kv[:, [0, 4]])


def test_a_range_of_rows_is_not_copied() -> None:
    kv = torch.randn(2, 50, 2, 4)
    assert HostStore([kv]).rows(0, slice(3, 9)).data_ptr() == kv[:, 3:].data_ptr()
