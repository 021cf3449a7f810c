"""Operands are made of projections with matching shapes; all others are refused."""

import pytest
import torch

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import causal_lens, v4_operands, v32_operands


@pytest.mark.parametrize("make", [v32_operands, v4_operands])
@pytest.mark.parametrize(
    ("q", "k", "projected", "says"),
    [
        ((3, 32), (5, 32), (3,), r"q has shape \[3, 32\]; wanted \[num_queries, num_heads, head_dim\]"),
        ((3, 0, 32), (5, 32), (3, 0), "at least one head"),
        ((3, 2, 32), (32,), (3, 2), r"k has shape \[32\]; wanted \[num_keys, 32\]"),
        ((3, 2, 32), (5, 64), (3, 2), r"k has shape \[5, 64\]"),
        ((3, 2, 32), (5, 32), (2, 3), r"projected has shape \[2, 3\]; wanted \[3, 2\]"),
    ],
)
def test_projections_of_wrong_shape_are_refused_with_the_reason(
    make: type[object], q: tuple[int, ...], k: tuple[int, ...], projected: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ArrayError, match=says):
        make(torch.zeros(q), torch.zeros(k), torch.zeros(projected))  # type: ignore[call-arg]


def test_lengths_beyond_int32_are_refused() -> None:
    most = 2**31 - 1
    assert causal_lens(2, most, first_position=most - 2).tolist() == [most - 1, most]
    with pytest.raises(ConfigError, match="num_keys is 2147483648; wanted at most 2147483647"):
        causal_lens(2, most + 1, first_position=most)
