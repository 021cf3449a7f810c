"""Products with weights of 8 or 4 bits, in CUDA C: `quantized.cu` says how."""

from functools import cache
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors
from csattn.models.quantized_weight import CODES, RUN, QuantizedWeight, WeightFormat
from csattn.models.spec import Activation
from csattn.models.weights import Linear
from workers.model.gpu.stream_ops import Launches
from workers.model.ops import SQUARES_BLOCK, Normed, Readers, Stream

_SOURCE = Path(__file__).with_name("quantized.cu")
_MULTIPLIERS, _TILE = 8, SQUARES_BLOCK  # a tile's outputs are a part of the squares
_THREADS = 32 * (_MULTIPLIERS + 2)  # two warps finish
_MOST_STAGES, _SHARED_BYTES = 3, 226 << 10  # that a block has, besides a few barriers
_ROWS = 1, 2, 4, 8  # that a block takes together
MOST_ROWS = _ROWS[-1]  # beyond, inputs are as many bytes as weights, and Triton's larger tiles read them less often
_FORMATS = get_args(WeightFormat)
_ACTIVATIONS = "none", "silu", "gelu_tanh", "quick_gelu", "relu", "relu2"
assert set(get_args(Activation)) - set(_ACTIVATIONS) == {"clamped"}  # which experts alone have


class QuantizedOps(Launches):
    """A part of `TritonOps`: products of rows in bfloat16. A row's results do not depend on the rows beside it."""

    def _is_for_few(self, weight: QuantizedWeight, num_rows: int) -> bool:
        """Whether the products of so many rows are those here."""
        return num_rows <= MOST_ROWS and _has_room(weight.words.device)

    def _multiply(
        self, x: Normed, linear: Linear, weight: QuantizedWeight, out: Tensor, gated: bool, activation: str
    ) -> None:
        num_squares = 0 if x.squares is None else len(x.squares)
        self._run(
            "multiply",
            weight,
            self._as_read(x.x, weight),
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
            weight,
            self._as_read(x, weight),
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

    def _run(self, name: str, weight: QuantizedWeight, x: Tensor, *args: object) -> None:
        assert x.dtype == torch.bfloat16, f"weights of few bits meet rows of bfloat16, not {x.dtype}"
        rows = next(rows for rows in _ROWS if rows >= len(x))
        assert weight.words.nbytes < 1 << 32, f"{weight.words.nbytes} bytes of weights, a kernel counts them in 32 bits"
        kernel = _kernel(name, weight.format, weight.group_size, rows, self._chain(), x.device)
        blocks = min(-(-len(weight) // _TILE), num_multiprocessors(x.device))
        kernel.launch((blocks, 1, 1), _THREADS, x, x.shape[1], *args)

    def _as_read(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """x as the weights have their inputs, in whole pieces of 16 bytes."""
        ordered = self._in_order(x, weight)
        if (filling := -weight.num_in % 8) == 0:
            return ordered
        self.break_chain()
        return functional.pad(ordered, (0, filling))

    def _in_order(self, x: Tensor, weight: QuantizedWeight | None) -> Tensor:
        """x as the weights have their inputs."""
        if weight is None or weight.order is None:
            return x
        self.break_chain()
        return x.index_select(1, weight.order)


def _weights(weight: QuantizedWeight) -> tuple[Tensor | int, ...]:
    """As the kernels are told of them: bytes from a row to the next, and numbers from a group's scales to the next."""
    return weight.words, weight.scales, weight.words.stride(0) * weight.words.element_size(), weight.scales.stride(0)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether blocks may have as much shared memory as they have on Hopper, and on Blackwell but for desktops'."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _kernel(
    name: str,
    format: WeightFormat,
    group_size: int,
    rows: int,
    early_start: bool,
    device: torch.device,  # that it is loaded on
) -> CudaKernel:
    scales, runs = RUN // group_size if 0 < group_size < RUN else 1, 1 if format == "fp8" else 2
    # as the source has them, of a multiplier
    stage = _TILE * 128 + 2 * CODES[format] * rows * 64 + runs * scales * _TILE * 4
    sums = 2 * 8 * 32 * 4
    stages = min(_MOST_STAGES, (_SHARED_BYTES // _MULTIPLIERS - sums) // stage)
    defines = {
        "THREADS": _THREADS,
        "MULTIPLIERS": _MULTIPLIERS,
        "FORMAT": _FORMATS.index(format),
        "GROUP": group_size,
        "ROWS": rows,
        "STAGES": stages,
        "SQUARES_BLOCK": SQUARES_BLOCK,
    }
    return cuda_kernel(_SOURCE, name, defines, _MULTIPLIERS * (stages * stage + sums), early_start)
