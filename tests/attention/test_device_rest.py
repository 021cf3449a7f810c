"""Attention on the device with an estimate of the rows that were not selected agrees with the definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from csattn.attention import device
from csattn.rest import Moments, moments_of
from csattn.rest.device import moment_table
from tests.ampere import skip_where_refused
from tests.attention.device_steps import Shape, Step, assert_close, attend_on_device, make_step
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import crossed

CONTEXTS = [(300, 20), (77, 40), (500, 1), (60, 0)]  # context_len and resident_len
SMALL = Shape(num_q_heads=4, head_dim=32)
COULD_BE_CHOSEN = [280, 37, 1_000_000, 60]
# context, tail_len, top_k; the second head selects one row less
MIXED = [(0, 5, 100), (1, 24, 17), (-1, 0, 0), (2, 1, 2), (0, 0, 1), (2, 3, 0), (1, 9, 38), (3, 0, 60)]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the kernels on the CPU if there is no device."""
    emulator.stand_in(monkeypatch, device, multiprocessors=5)


def make_moments(shape: Shape, seed: int, num_rows: int = 400) -> Moments:
    """Return moments of keys and values that are neither centred nor independent, rounded as for the device."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * shape.head_dim
    mixed = torch.randn(shape.num_kv_heads, num_rows, width, generator=generator)
    mixed = mixed @ (torch.randn(shape.num_kv_heads, width, width, generator=generator) / width**0.5)
    offset = torch.randn(shape.num_kv_heads, 1, width, generator=generator)
    moments = moments_of([(mixed + offset).view(shape.num_kv_heads, num_rows, 2, shape.head_dim)])
    scale = shape.softmax_scale
    table = moment_table(moments, scale, shape.dtype).float()
    covs = [table[:, 2:, 0] / scale**2, table[:, 2:, 1].transpose(1, 2) / scale]
    return Moments(np.concatenate([moments.table[:, :2], *covs], axis=1))


def make_estimated(shape: Shape, batch: list[tuple[int, int, int]] = MIXED, size: float = 1.0) -> Step:
    step = make_step(shape, CONTEXTS, batch, num_spilled=3)
    moments = [(make_moments(shape, seed), num_rows) for seed, num_rows in enumerate(COULD_BE_CHOSEN)]
    return replace(step, q=size * step.q, moments=moments)


SHAPES = [(9, 3, 3, 64), (8, 2, 8, 16), (7, 1, 1, 80), (32, 2, 2, 16), (8, 2, 2, 128), (16, 2, 2, 256), (4, 1, 1, 512)]


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "num_index_heads", "head_dim", "dtype"), crossed(SHAPES, DTYPES)
)
def test_device_attention_with_an_estimated_rest_equals_the_definition(
    num_q_heads: int, num_kv_heads: int, num_index_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    skip_where_refused(head_dim, dtype)
    step = make_estimated(
        Shape(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            num_index_heads=num_index_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
    )
    want = step.wanted()
    assert_close(attend_on_device(step), want)
    assert (want - replace(step, moments=None).wanted()).abs().max() > 0.1


@pytest.mark.parametrize(("size", "dtype"), crossed([(0.0,), (1e-3,), (8.0,), (60.0,)], DTYPES))
def test_an_estimated_rest_equals_the_definition_for_queries_of_any_size(size: float, dtype: torch.dtype) -> None:
    """Their logits range from all equal to a few that are far above the others."""
    step = make_estimated(replace(SMALL, dtype=dtype), size=size)
    assert_close(attend_on_device(step), step.wanted())


def test_an_estimated_rest_of_keys_without_variance_equals_the_definition() -> None:
    step = make_estimated(SMALL)
    moments = [(make_moments(step.shape, seed, num_rows=1), n) for seed, (_, n) in enumerate(step.moments or ())]
    step = replace(step, moments=moments)
    assert_close(attend_on_device(step), step.wanted())


@pytest.mark.parametrize("top_k", [1, 50, 259, 260])
def test_an_estimated_rest_has_the_definitions_weight_if_selected_rows_are_zero(top_k: int) -> None:
    """Selected rows are zeros, so the output has the estimate's direction alone, and any error of its weight shows."""
    shape = replace(SMALL, max_top_k=300)
    step = make_step(shape, [(261, 0)], [(0, 0, top_k)])
    step.far[0][:, :, 0] *= 0.0
    step.far[0][:, :, 1] *= 0.0
    moments = make_moments(shape, 5)
    step = replace(step, moments=[(moments, 261)])
    assert_close(attend_on_device(step), step.wanted())


def test_a_rows_attention_with_a_rest_has_the_same_bits_in_any_batch() -> None:
    step = make_estimated(SMALL)
    whole = attend_on_device(step)
    for batch_rows in ([0], [3], [4, 1], [2, 6, 0, 0, 1, 7]):
        assert torch.equal(attend_on_device(step.take(batch_rows)), whole[batch_rows])
