"""The definition of a linear stage, in float64."""

import torch
from torch import Tensor

from csattn.models.spec import Activation
from workers.model.torch_ops import activated


def linear(
    x: Tensor,  # [num_rows, num_in] float32
    weight: Tensor,  # [num_out, num_in]
    out: Tensor,  # [num_rows, num_out] float32: what was there before
    bias: Tensor | None = None,  # [num_out]
    activation: Activation | None = None,
    up_weight: Tensor | None = None,  # [num_out, num_in]
    up_bias: Tensor | None = None,  # [num_out]
    multiplier: float | None = None,
) -> Tensor:
    """What is written to `out`."""
    product = _product(x, weight, bias)
    up = torch.ones_like(product) if up_weight is None else _product(x, up_weight, up_bias)
    product = product * up if activation is None else activated(activation, product, up)
    return (product if multiplier is None else out.double() + multiplier * product).float()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
