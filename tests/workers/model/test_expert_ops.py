"""The Triton operations of experts (MoE routing and MLPs) agree with their definition in torch."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights
from tests.cuda_on_cpu.emulated import crossed
from tests.workers.model.step_ops import (
    DEVICE,
    DTYPES,
    EPS,
    EXPERTS,
    assert_same_stream,
    copy_of,
    make_choice,
    make_expert_buffers,
    make_linear,
    make_stream,
    normed,
    prepared,
    randn,
    readers,
    rows_of_tokens,
    tolerance,
)
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import Normed
from workers.model.torch_ops import TorchOps


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("batch_size", [1, 3, 17])
def test_triton_choose_experts_equals_torch(kind: str, batch_size: int) -> None:
    spec = EXPERTS[kind]
    logits = randn(batch_size, spec.num_experts, scale=2)
    logits[0] = float(logits[0, 0])  # equal logits: the first are chosen
    weights, rows = make_choice(spec), rows_of_tokens(torch.randint(11, (batch_size,)).tolist())
    got, want = (make_expert_buffers(spec, batch_size, 1, torch.float32, logits) for _ in range(2))
    TritonOps(DEVICE, EPS).choose_experts(weights, spec, rows, got)
    TorchOps(EPS).choose_experts(weights, spec, rows, want)
    assert torch.equal(got.chosen, want.chosen)
    torch.testing.assert_close(got.shares, want.shares, **tolerance(torch.float32))


def test_nan_logits_choose_valid_experts() -> None:
    spec = replace(EXPERTS["plain"], scores="sigmoid", normed=False)
    buffers = make_expert_buffers(spec, 2, 1, torch.float32, torch.full((2, 5), torch.nan, device=DEVICE))
    TritonOps(DEVICE, EPS).choose_experts(make_choice(spec), spec, rows_of_tokens([0, 0]), buffers)
    assert buffers.chosen.min() >= 0 and buffers.chosen.max() < 5


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # by Triton's interpreter
def test_shares_are_zero_if_all_chosen_scores_are_zero() -> None:
    """Shares are 0, not NaN, where the sigmoid of all chosen experts is 0."""
    spec = replace(EXPERTS["groups"], has_choice_bias=False)
    logits = torch.full((2, spec.num_experts), -200.0, device=DEVICE)
    logits[1, 3] = 1.0
    for ops in (TritonOps(DEVICE, EPS), TorchOps(EPS)):
        buffers = make_expert_buffers(spec, 2, 1, torch.float32, logits)
        ops.choose_experts(make_choice(spec), spec, rows_of_tokens([0, 0]), buffers)
        assert buffers.shares[0].tolist() == [0.0, 0.0, 0.0] and buffers.shares[1].tolist() == [1.5, 0.0, 0.0]


def make_experts(spec: ExpertsSpec, hidden_size: int, dtype: torch.dtype) -> ExpertWeights:
    num, width = spec.num_experts, spec.intermediate_size
    scale = 8 if spec.activation == "limited" else 2
    both = randn(num, (1 + spec.gated) * width, hidden_size, dtype=dtype, scale=scale * hidden_size**-0.5)
    biases = randn(num, 2 * width, dtype=dtype).chunk(2, dim=1) if spec.bias else (None, None)
    return ExpertWeights(
        router=make_linear(num, hidden_size, dtype),
        gates=both[:, :width],
        ups=both[:, width:] if spec.gated else None,
        down=randn(num, hidden_size, width, dtype=dtype, scale=width**-0.5),
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=randn(num, hidden_size, dtype=dtype) if spec.bias else None,
    )


@pytest.mark.parametrize(
    ("batch_size", "hidden_size", "kind", "dtype"),
    crossed([(*sizes, kind) for kind in EXPERTS for sizes in ((1, 64), (3, 100), (17, 130))], DTYPES),
)
def test_triton_experts_equal_torch(batch_size: int, hidden_size: int, kind: str, dtype: torch.dtype) -> None:
    """Some rows share experts, more than fill a tile, and some experts are chosen by no row."""
    spec, stream = EXPERTS[kind], prepared(batch_size, hidden_size, dtype)
    weights = make_experts(spec, hidden_size, dtype)
    chosen = torch.stack([torch.randperm(max(1, spec.num_experts - 1))[: spec.num_chosen] for _ in range(batch_size)])
    if chosen.shape[1] < spec.num_chosen:
        chosen = torch.arange(spec.num_chosen).repeat(batch_size, 1)
    shares, logits = torch.rand(batch_size, spec.num_chosen, device=DEVICE), randn(batch_size, spec.num_experts)
    got, want = (make_expert_buffers(spec, batch_size, hidden_size, dtype, logits) for _ in range(2))
    for buffers in (got, want):
        buffers.chosen.copy_(chosen)
        buffers.shares.copy_(shares)
    x = normed(stream) if batch_size != 3 else Normed(stream.scaled)
    TritonOps(DEVICE, EPS).experts(x, weights, spec, got)
    TorchOps(EPS).experts(x, weights, spec, want)
    close = tolerance(dtype)
    if spec.activation == "limited":  # gates and ups are ten times as large, so that they reach their limits
        close["atol"] *= 10
    torch.testing.assert_close(got.gated, want.gated, **close)
    got_stream = make_stream(batch_size, hidden_size, dtype)
    want_stream, read = copy_of(got_stream), readers("both", hidden_size)
    got.gated.copy_(want.gated)
    TritonOps(DEVICE, EPS).experts_add(weights, spec, got, 0.5, got_stream, read)
    TorchOps(EPS).experts_add(weights, spec, want, 0.5, want_stream, read)
    assert_same_stream(got_stream, want_stream, ahead=True)
    alone, want_alone = randn(batch_size, hidden_size, dtype=dtype), randn(batch_size, hidden_size, dtype=dtype)
    TritonOps(DEVICE, EPS).experts_out(weights, spec, got, alone)
    TorchOps(EPS).experts_out(weights, spec, want, want_alone)
    torch.testing.assert_close(alone, want_alone, **tolerance(dtype))
    added = randn(batch_size, hidden_size)
    want_added = added.clone()
    TritonOps(DEVICE, EPS).experts_out(weights, spec, got, added, adds=True)
    TorchOps(EPS).experts_out(weights, spec, want, want_added, adds=True)
    torch.testing.assert_close(added, want_added, **tolerance(dtype))
