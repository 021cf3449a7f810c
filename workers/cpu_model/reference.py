"""The definition of a linear stage, in float64."""

import torch
from torch import Tensor

from workers.cpu_model.linear_stage import ADD, GATE


def linear(
    x: Tensor,  # [num_rows, num_in] float32
    weight: Tensor,  # [num_out, num_in]
    out: Tensor,  # [num_rows, num_out] float32: what was there before
    mode: int,
    bias: Tensor | None = None,  # [num_out]
    up_weight: Tensor | None = None,  # [num_out, num_in]
) -> Tensor:
    """What is written to `out`."""
    product = x.double() @ weight.double().T
    if bias is not None:
        product = product + bias.double()
    if mode == GATE:
        assert up_weight is not None
        product = torch.nn.functional.silu(product) * (x.double() @ up_weight.double().T)
    return (product + out.double() if mode == ADD else product).float()
