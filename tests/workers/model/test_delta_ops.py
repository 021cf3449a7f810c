"""The Triton operation of linear attention agrees with its definition in torch."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.spec import DeltaSpec
from csattn.models.weights import DeltaWeights
from tests.workers.model.step_ops import DEVICE, DTYPES, EPS, make_linear, make_rows, randn, tolerance
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import DeltaBuffers, DeltaState
from workers.model.torch_ops import TorchOps

DELTAS = [
    DeltaSpec(num_k_heads=2, num_v_heads=4, k_dim=12, v_dim=20, conv_len=4),
    DeltaSpec(num_k_heads=1, num_v_heads=1, k_dim=64, v_dim=33, conv_len=2),
    DeltaSpec(num_k_heads=3, num_v_heads=3, k_dim=8, v_dim=16, conv_len=3),
]


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", DELTAS)
def test_triton_linear_attention_equals_torch(spec: DeltaSpec, dtype: torch.dtype, versions: int) -> None:
    """One request has several tokens in a step, beside others and idle rows. States of no active row stay untouched."""
    rows = make_rows([0, 0, 1, 0, -1, 1], [3, 0, 2, 3, 5, 2], [1, 0, 5, 2, 1, 6])
    inputs = randn(6, spec.in_width, dtype=dtype)
    decay, decay_bias = torch.rand(2, spec.num_v_heads, device=DEVICE)
    norm, conv = 1 + randn(spec.v_dim, scale=0.2), randn(spec.num_channels, spec.conv_len)
    weights = DeltaWeights((make_linear(spec.in_width, 8, dtype),), conv, decay, decay_bias, norm)
    version = torch.tensor([0, 0, versions - 1, 0, 0, 0], device=DEVICE)
    states = [randn(6, versions, *sizes) for sizes in spec.parts]
    for state in states:
        state[[0, 1, 4]] = torch.nan  # states of no active row
    got, want = (DeltaState(*(state.clone() for state in states), version) for _ in range(2))
    mixed = torch.full((2, 6, spec.num_channels), torch.nan, dtype=dtype, device=DEVICE)
    outs = torch.zeros(2, 6, spec.v_width, dtype=dtype, device=DEVICE)
    TritonOps(DEVICE).delta(weights, spec, EPS, rows, got, DeltaBuffers(inputs, mixed[0], outs[0]))
    TorchOps().delta(weights, spec, EPS, rows, want, DeltaBuffers(inputs, mixed[1], outs[1]))
    torch.testing.assert_close(outs[0], outs[1], **tolerance(dtype))
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.conv, want.conv, equal_nan=True, **close)
    torch.testing.assert_close(got.memory, want.memory, equal_nan=True, **close)
    assert got.memory[[2, 3, 5]].isfinite().all() and got.memory[[0, 1, 4]].isnan().all()
    if versions == 2:
        assert torch.equal(got.memory[3, 0], states[1][3, 0]), "what was read is still there"
