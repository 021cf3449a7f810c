"""Products with weights of 8 or 4 bits, in CUDA C: `quantized.cu` says how."""

from functools import cache
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat
from csattn.models.spec import Activation
from csattn.models.weights import Linear
from workers.model.gpu.stream_ops import Launches
from workers.model.ops import SQUARES_BLOCK, Normed, Readers, Stream

_SOURCE = Path(__file__).with_name("quantized.cu")
_THREADS, _TILE, _STAGES = 256, SQUARES_BLOCK, 4  # a tile's outputs are a part of the squares
_OCTETS = 1, 2, 4  # of rows that a block takes together, at most
_BLOCKS_PER_SM = {1: 2, 2: 2, 4: 1}  # side by side, by octets
_FORMATS = get_args(WeightFormat)
_ACTIVATIONS = "none", "silu", "gelu_tanh", "quick_gelu", "relu", "relu2"
assert set(get_args(Activation)) - set(_ACTIVATIONS) == {"clamped"}  # which experts alone have


class QuantizedOps(Launches):
    """A part of `TritonOps`: products of rows in bfloat16. A row's results do not depend on the rows beside it."""

    def _multiply(
        self, x: Normed, linear: Linear, weight: QuantizedWeight, out: Tensor, gated: bool, activation: str
    ) -> None:
        num_squares = 0 if x.squares is None else len(x.squares)
        self._run(
            "multiply",
            len(x.x),
            weight,
            out.shape[1] * (2 if gated else 1),
            self._in_order(x.x, weight),
            0 if x.squares is None else x.squares,
            *_weights(weight),
            0 if linear.bias is None else linear.bias,
            out,
            int(out.dtype == torch.float32),
            *out.shape,
            weight.num_in,
            num_squares,
            x.eps,
            int(gated),
            _ACTIVATIONS.index(activation),
        )

    def _multiply_and_add(
        self, x: Tensor, linear: Linear, weight: QuantizedWeight, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        self._run(
            "multiply_and_add",
            len(x),
            weight,
            len(weight),
            self._in_order(x, weight),
            *_weights(weight),
            0 if linear.bias is None else linear.bias,
            stream.hidden,
            0 if readers.norm is None else readers.norm,
            stream.scaled,
            0 if readers.ahead is None else readers.ahead,
            stream.scaled_ahead,
            stream.squares,
            len(x),
            len(weight),
            weight.num_in,
            multiplier,
        )

    def _run(self, name: str, num_rows: int, weight: QuantizedWeight, num_out: int, x: Tensor, *args: object) -> None:
        """Launch on the rows x, in bfloat16, as many of them together as a block takes."""
        assert x.dtype == torch.bfloat16, f"weights of few bits meet rows of bfloat16, not {x.dtype}"
        octets = next((octets for octets in _OCTETS if 8 * octets >= num_rows), _OCTETS[-1])
        kernel = _kernel(name, weight.format, weight.group_size, octets, self._chain())
        blocks = min(-(-num_out // _TILE), _BLOCKS_PER_SM[octets] * num_multiprocessors(x.device))
        kernel.launch((blocks, -(-num_rows // (8 * octets)), 1), _THREADS, x, *args)

    def _in_order(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """x as the weights have their inputs."""
        if weight.order is None:
            return x
        self.break_chain()
        return x.index_select(1, weight.order)


def _weights(weight: QuantizedWeight) -> tuple[Tensor | int, ...]:
    """As the kernels are told of them: bytes from a row to the next, and numbers from a group's scales to the next."""
    return weight.words, weight.scales, weight.words.stride(0) * weight.words.element_size(), weight.scales.stride(0)


@cache
def _kernel(name: str, format: WeightFormat, group_size: int, octets: int, early_start: bool) -> CudaKernel:
    warps = _THREADS // 32
    copies, sums = warps * _STAGES * 4 * 32 * 16, 2 * warps * 8 * octets * 32 * 4
    defines = {
        "THREADS": _THREADS,
        "FORMAT": _FORMATS.index(format),
        "GROUP": group_size,
        "OCTETS": octets,
        "STAGES": _STAGES,
        "BLOCKS_PER_SM": _BLOCKS_PER_SM[octets],
    }
    return cuda_kernel(_SOURCE, name, defines, copies + sums, early_start)
