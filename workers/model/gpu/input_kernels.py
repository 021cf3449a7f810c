"""Kernels for the layers' own inputs of each token, besides the stream: see `csattn.models.weights.InputWeights`."""

# Triton kernels are untyped, and their constants upper case by custom.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from csattn.cuda.triton_start import wait_for_earlier
from workers.model.gpu.linear_kernels import activated


@triton.jit
def make_inputs_kernel(
    projected,  # [num_rows, num_layers, width]
    norm,  # [width] float32
    token_ids,  # [num_rows] int64
    table,  # [vocab_size, num_layers, width]
    out,  # [num_layers, num_rows, width] <-
    width,
    eps,
    scale,
    table_scale,
    BLOCK: tl.constexpr,  # at least width
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    layer = tl.program_id(1)
    num_layers = tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    inside = i < width
    weight = tl.load(norm + i, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    token_id = tl.load(token_ids + row)
    own = tl.load(table + (token_id * num_layers + layer) * width + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(projected + (row * num_layers + layer) * width + i, mask=inside, other=0.0).to(tl.float32) * scale
    value = value * tl.math.rsqrt(tl.sum(value * value, axis=0) / width + eps) * weight
    value = 0.7071067811865476 * (value + own * table_scale)
    at = out + (layer * tl.num_programs(0) + row) * width + i
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_input_kernel(gates, layer_input, num, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gates = activation(gates) * layer_input, both of `num` elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_earlier(PDL)
    gate = tl.load(gates + i, mask=i < num, other=0.0).to(tl.float32)
    factor = tl.load(layer_input + i, mask=i < num, other=0.0).to(tl.float32)
    tl.store(gates + i, (activated(gate, ACTIVATION) * factor).to(gates.dtype.element_ty), mask=i < num)
