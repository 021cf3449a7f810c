"""Weights in few bits for tests."""

import torch

from csattn.models.quantized_weight import QuantizedWeight, WeightFormat
from tests.workers.model.step_ops import DEVICE

# format, inputs of a group, whether there are zero points
KINDS: list[tuple[WeightFormat, int, bool]] = [
    ("fp8", 0, False), ("fp8", 128, False), ("fp8", 64, False),
    ("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 64, False), ("int4", 0, True),
    ("int4", 256, False),
]  # fmt: skip


def make_quantized(num_out: int, num_in: int, format: WeightFormat, group_size: int, zeros: bool) -> QuantizedWeight:
    """Every code there is, with scales that make the weights about num_in ** -0.5."""
    codes = torch.randint(0, 256 if format == "fp8" else 16, (num_out, num_in), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN in fp8
    num_groups = -(-num_in // (group_size or num_in))
    scales = (0.5 + torch.rand(num_out, num_groups)) * num_in**-0.5 / (100 if format == "fp8" else 4)
    if format == "fp4":
        scales = torch.randint(117, 123, (num_out, num_groups), dtype=torch.uint8)
    zero_of = torch.randint(0, 16, (num_out, num_groups)) if zeros else None
    return QuantizedWeight.pack(format, codes, scales, group_size, zero_of).to(DEVICE)
