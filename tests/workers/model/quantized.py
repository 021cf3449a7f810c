"""Quantized weights for tests."""

import torch

from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight, WeightFormat
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights, by_expert
from tests.workers.model.step_ops import DEVICE, randn

# format, group_size, whether there are zero points
KINDS: list[tuple[WeightFormat, int, bool]] = [
    ("fp8", 0, False), ("fp8", 128, False), ("fp8", 64, False),
    ("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 64, False), ("int4", 0, True),
    ("int4", 256, False),
]  # fmt: skip

# key of EXPERTS, format, group_size, whether there are zero points
KINDS_OF_EXPERTS: list[tuple[str, WeightFormat, int, bool]] = [
    ("clamped", "fp4", 32, False), ("plain", "fp8", 128, False), ("all", "int4", 128, True),
    ("one", "fp8", 0, False), ("groups", "int4", 32, True), ("limited", "fp4", 32, False),
    ("ungated", "int4", 32, True),
]  # fmt: skip


def make_quantized(num_out: int, num_in: int, format: WeightFormat, group_size: int, zeros: bool) -> QuantizedWeight:
    """Make random codes, with scales that make the weights about num_in ** -0.5."""
    codes = torch.randint(0, 256 if format == "fp8" else 16, (num_out, num_in), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN in fp8
    num_groups = -(-num_in // (group_size or num_in))
    scales = (0.5 + torch.rand(num_out, num_groups)) * num_in**-0.5 / (100 if format == "fp8" else 4)
    if format == "fp4":
        scales = torch.randint(117, 123, (num_out, num_groups), dtype=torch.uint8)
    zero_of = torch.randint(0, 16, (num_out, num_groups)) if zeros else None
    return QuantizedWeight.pack(format, codes, scales, group_size, zero_of).to(DEVICE)


def make_quantized_experts(
    spec: ExpertsSpec,
    hidden_size: int,
    kind: tuple[WeightFormat, int, bool],
    dtype: torch.dtype = torch.bfloat16,  # of biases
) -> ExpertWeights:
    num, width = spec.num_experts, spec.intermediate_size
    gate_up = make_quantized(num * (1 + spec.gated) * width, hidden_size, *kind)
    down = make_quantized(num * hidden_size, width, *kind)
    gates, ups, downs = by_expert(gate_up.words, down.words, num, spec.gated)
    biases = randn(num, 2 * width, dtype=dtype).chunk(2, dim=1) if spec.bias else (None, None)
    return ExpertWeights(
        router=None,  # type: ignore[arg-type]
        gates=gates,
        ups=ups,
        down=downs,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=randn(num, hidden_size, dtype=dtype) if spec.bias else None,
        quantized=QuantizedExperts(gate_up, down),
    )


def choose(spec: ExpertsSpec, batch_size: int) -> torch.Tensor:
    """Choose experts at random [batch_size, num_chosen] int32; never the last one, unless all are chosen."""
    several = max(spec.num_chosen, spec.num_experts - 1)
    return torch.stack([torch.randperm(several)[: spec.num_chosen] for _ in range(batch_size)]).int()
