"""`key_error` detects formats that lose the differences between keys, here of made-up keys."""

import math

import pytest
import torch

from offload.codecs.formats import FORMATS
from offload.codecs.key_error import key_error

HEAD_DIM, LOST = 64, 0.8


def biased(bias: float, turn: float, num_rows: int = 600) -> torch.Tensor:
    """Return Gaussian KV [2, num_rows, 2, HEAD_DIM]. The second head's keys have a bias, rotated by `turn` a row."""
    kv = torch.randn(2, num_rows, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    angle = turn * torch.arange(num_rows)
    kv[1, :, 0, 31] += bias * angle.cos()
    kv[1, :, 0, 63] += bias * angle.sin()
    return kv


@pytest.mark.parametrize("turn", [1.0, 0.1, 0.001])
def test_key_error_detects_a_rotating_bias_in_coarse_formats(turn: float) -> None:
    plain, large = biased(0.0, turn), biased(300.0, turn)
    assert all(key_error(plain, form) < 0.2 for form in FORMATS.values())
    errors = {name: key_error(large, form) for name, form in FORMATS.items()}
    assert errors["q4_0"] > LOST > max(errors["bfloat16"], errors["float16"], errors["float32"])
    assert errors["fp8"] > LOST or turn < 0.1  # fp8's scale follows the largest number if that stays the same one
    assert key_error(large[:1], FORMATS["q4_0"]) < 0.2  # the head without a bias


def test_key_error_ignores_values_and_contexts_with_few_rows() -> None:
    kv = biased(0.0, 0.0)
    want = key_error(kv, FORMATS["q4_0"])
    kv[:, :, 1] = math.nan
    assert key_error(kv, FORMATS["q4_0"]) == want == key_error(kv.double(), FORMATS["q4_0"]) > 0
    assert key_error(biased(300.0, 0.1, 31), FORMATS["q4_0"]) == 0 < key_error(biased(300.0, 0.1, 32), FORMATS["q4_0"])
    assert key_error(torch.full((1, 40, 2, 32), 0.3), FORMATS["q4_0"]) == 0
    assert key_error(torch.zeros(1, 40, 2, 32), FORMATS["q8_0"]) == 0


def test_key_error_samples_existing_rows_of_contexts_longer_than_float32_counts() -> None:
    repeated = torch.ones(1, 1, 2, 32).expand(1, 2**24 + 31, 2, 32)  # one row in memory
    assert key_error(repeated, FORMATS["q8_0"]) == 0
