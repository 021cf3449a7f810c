"""Low-bit KV encodes rows as published."""

import numpy as np
import pytest
import torch

from bench.accuracy.attending import low_bit


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_by_range_are_within_half_a_step(bits, rng):
    rows = torch.from_numpy(rng.standard_normal((2, 77), dtype=np.float32))
    error = (low_bit._by_range(rows, bits) - rows).abs().max()
    assert float(error) < 0.55 * float(rows.max() - rows.min()) / (2**bits - 1)


def test_levels_are_those_of_the_normal_distribution():
    # Max, 1960
    torch.testing.assert_close(low_bit.normal_levels(1)[1:], torch.tensor([0.7979]), atol=1e-3, rtol=0)
    torch.testing.assert_close(low_bit.normal_levels(2)[2:], torch.tensor([0.4528, 1.510]), atol=1e-3, rtol=0)


def test_q4_0_keeps_the_largest_number_of_a_block(rng):
    rows = torch.from_numpy(rng.standard_normal((3, 64), dtype=np.float32))
    rows[1] = 0.0
    coded = low_bit.decoded_q4_0(*low_bit.coded_q4_0(rows))
    largest = rows[[0, 2]].unflatten(1, (2, 32)).abs().argmax(2, keepdim=True)
    kept, was = (t[[0, 2]].unflatten(1, (2, 32)).gather(2, largest) for t in (coded, rows))
    torch.testing.assert_close(kept, was, rtol=2e-3, atol=0)
    assert not coded[1].any()
    assert (
        (coded - rows).unflatten(1, (2, 32)).abs().amax(2) <= rows.unflatten(1, (2, 32)).abs().amax(2) / 8 + 1e-3
    ).all()


def test_rotated_rows_spend_more_bits_on_the_largest_channels(rng):
    rows = torch.from_numpy(rng.standard_normal((2, 500, 64), dtype=np.float32))
    large = torch.from_numpy(rng.permutation(64)[:32])
    rows[..., large] *= 20.0
    errors = {bits: (low_bit._decode_rotated(rows, bits) - rows).square().mean((0, 1)) for bits in ((3,), (4, 3), (4,))}
    theirs, others = large, torch.tensor([i for i in range(64) if i not in large])
    # Max, 1960: 3 bits lose 0.0345 of a normal distribution's variance, 4 bits 0.0095
    assert float(errors[4, 3][theirs].mean()) == pytest.approx(0.0095 * 400, rel=0.1)
    assert float(errors[4, 3][others].mean()) == pytest.approx(0.0345, rel=0.1)
    assert float(errors[3,].mean()) > 3 * float(errors[4, 3].mean()), "one rotation spreads what is large over all"
    assert float(errors[4,][others].mean()) > 50 * float(errors[4, 3][others].mean())
