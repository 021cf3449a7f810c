"""The Triton operation of layers that keep a state agrees with its definition in torch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.weights import MemoryWeights, RecurrentWeights
from tests.workers.model.step_ops import DEVICE, DTYPES, EPS, make_linear, make_rows, randn, tolerance
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import RecurrentBuffers, RecurrentState
from workers.model.torch_ops import TorchOps

SPECS = [
    DeltaSpec(num_k_heads=2, num_v_heads=4, k_dim=12, v_dim=20, conv_len=4),
    DeltaSpec(num_k_heads=1, num_v_heads=1, k_dim=64, v_dim=33, conv_len=2),
    DeltaSpec(num_k_heads=3, num_v_heads=3, k_dim=8, v_dim=16, conv_len=3),
    ScanSpec(num_heads=4, num_groups=2, head_dim=12, state_dim=20, conv_len=4),
    ScanSpec(num_heads=1, num_groups=1, head_dim=70, state_dim=128, conv_len=2, least_step=0.5),
    ScanSpec(num_heads=6, num_groups=3, head_dim=8, state_dim=16, conv_len=3),
    ConvSpec(num_channels=130, conv_len=3),
    ConvSpec(num_channels=24, conv_len=4),
]


def make_weights(spec: RecurrentSpec, dtype: torch.dtype) -> RecurrentWeights:
    """Random weights; a convolution of four tokens has no bias."""
    inputs, conv = (make_linear(spec.in_width, 8, dtype),), randn(spec.num_channels, spec.conv_len)
    bias = None if spec.conv_len == 4 else randn(spec.num_channels)
    if isinstance(spec, ConvSpec):
        return RecurrentWeights(inputs, conv, bias)
    is_delta = isinstance(spec, DeltaSpec)
    decay, step_bias, skip = torch.rand(3, spec.num_v_heads if is_delta else spec.num_heads, device=DEVICE)
    norm = 1 + randn(spec.v_dim if is_delta else spec.out_width, scale=0.2)
    memory = MemoryWeights(decay, step_bias, norm, None if is_delta else skip)
    return RecurrentWeights(inputs, conv, bias, memory)


def of_all(states: list[Tensor], version: Tensor) -> RecurrentState:
    return RecurrentState(*(state.clone() for state in states), version)


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_triton_layers_with_a_state_equal_torch(spec: RecurrentSpec, dtype: torch.dtype, versions: int) -> None:
    """One request has several tokens in a step, beside others and idle rows. States of no active row stay untouched."""
    rows = make_rows([0, 0, 1, 0, -1, 1], [3, 0, 2, 3, 5, 2], [1, 0, 5, 2, 1, 6])
    inputs, weights = randn(6, spec.in_width, dtype=dtype), make_weights(spec, dtype)
    version = torch.tensor([0, 0, versions - 1, 0, 0, 0], device=DEVICE)
    states = [randn(6, versions, *sizes) for sizes in spec.parts]
    for state in states:
        state[[0, 1, 4]] = torch.nan  # states of no active row
    got, want = of_all(states, version), of_all(states, version)
    mixed = torch.full((2, 6, spec.num_channels), torch.nan, dtype=dtype, device=DEVICE)
    outs = torch.zeros(2, 6, spec.out_width, dtype=dtype, device=DEVICE)
    TritonOps(DEVICE, EPS).recurrent(weights, spec, rows, got, RecurrentBuffers(inputs, mixed[0], outs[0]))
    TorchOps(EPS).recurrent(weights, spec, rows, want, RecurrentBuffers(inputs, mixed[1], outs[1]))
    active = rows.tail_lens > 0
    torch.testing.assert_close(outs[0, active], outs[1, active], **tolerance(dtype))
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.conv, want.conv, equal_nan=True, **close)
    torch.testing.assert_close(got.memory, want.memory, equal_nan=True, **close)
    for state in (got.conv, got.memory):
        assert state[[2, 3, 5]].isfinite().all() and state[[0, 1, 4]].isnan().all()
    if versions == 2:
        assert torch.equal(got.conv[3, 0], states[0][3, 0]), "what was read is still there"
        assert torch.equal(got.memory[3, 0], states[1][3, 0])
