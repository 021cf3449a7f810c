"""Launches of the CUDA C kernels for products with weights of 8 or 4 bits: see `quantized.cuh`."""

from functools import cache
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from csattn.cuda import CudaKernel, cuda_kernel, limits, num_multiprocessors
from csattn.models.quantized_weight import CODES, RUN, QuantizedWeight, WeightFormat
from csattn.models.spec import Activation
from csattn.models.weights import Linear
from workers.model.gpu.stream_ops import Launches
from workers.model.gpu.tiles import MAX_BATCH_SIZE
from workers.model.ops import QUANTIZED_ROWS, SQUARES_BLOCK, Normed, Readers, Stream

_OF_STEPS, _OF_EXPERTS = (Path(__file__).with_name(name) for name in ("quantized.cu", "experts.cu"))
_TILE = SQUARES_BLOCK  # outputs of a tile, whose squares are summed in one part
_MAX_MULTIPLIERS, _FINISHERS = 8, 2  # warps of a block
_MAX_STAGES, _BARRIER_BYTES = 3, 1 << 10
_ROWS = 1, 2, 4, QUANTIZED_ROWS  # numbers of rows of a block for which kernels are compiled
_FORMATS = get_args(WeightFormat)
_ACTIVATIONS: tuple[Activation | None, ...] = (None, *get_args(Activation))  # in the order of `quantized.cuh`
_MAX_PAIRS = 1024  # of a row of a step and one of its experts


class QuantizedOps(Launches):
    """The part of `TritonOps` for products of bfloat16 rows with weights of 8 or 4 bits.

    A row's results do not depend on the rows beside it.
    """

    def _multiply(
        self,
        x: Normed,
        linear: Linear,
        weight: QuantizedWeight,
        out: Tensor,
        activation: Activation | None,
        gated: bool,
    ) -> None:
        num_squares = 0 if x.squares is None else len(x.squares)
        self._run(
            "multiply",
            weight,
            self._ordered_and_padded(x.x, weight),
            x.squares,
            *_weights(weight),
            linear.bias,
            out,
            int(out.dtype == torch.float32),
            *out.shape,
            weight.num_in,
            num_squares,
            self._eps,
            int(gated),
            _ACTIVATIONS.index(activation),
        )

    def _multiply_and_add(
        self, x: Tensor, linear: Linear, weight: QuantizedWeight, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        self._run(
            "multiply_and_add",
            weight,
            self._ordered_and_padded(x, weight),
            *_weights(weight),
            linear.bias,
            stream.hidden,
            readers.norm,
            stream.scaled,
            readers.ahead,
            stream.scaled_ahead,
            stream.squares,
            len(x),
            len(weight),
            weight.num_in,
            multiplier,
        )

    def _multiply_experts(
        self,
        x: Normed,  # [batch_size, num_in], or [batch_size * num_chosen, num_in]
        weight: QuantizedWeight,  # of all experts, one below the other
        bias: Tensor | None,  # [num_experts, outputs of one], contiguous
        chosen: Tensor,  # [batch_size, num_chosen] int32
        chosen_early: bool,  # whether the kernel before this one has waited for the kernel that wrote chosen
        in_shares: Tensor | None,  # [batch_size, num_chosen] float32: factors of inputs
        out_shares: Tensor | None,  # [batch_size, num_chosen] float32: factors of outputs
        out: Tensor,  # [batch_size, num_chosen, outputs] <-
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        num_pairs, num_out, rows = chosen.numel(), out.shape[2], min(QUANTIZED_ROWS, len(chosen))
        assert num_pairs <= _MAX_PAIRS, f"{num_pairs} pairs of a row and an expert, a kernel sorts {_MAX_PAIRS}"
        self._launch_product(
            _OF_EXPERTS,
            "multiply_experts",
            weight,
            rows,
            num_pairs * -(-num_out // (_TILE // 2 if gated else _TILE)),
            self._ordered_and_padded(x.x, weight),
            num_pairs // len(x.x),
            x.squares,
            *_weights(weight),
            bias,
            chosen,
            int(chosen_early),
            in_shares,
            out_shares,
            out,
            num_pairs,
            num_out,
            weight.num_in,
            0 if x.squares is None else len(x.squares),
            self._eps,
            int(gated),
            _ACTIVATIONS.index(activation),
        )

    def _run(self, name: str, weight: QuantizedWeight, x: Tensor, *args: object) -> None:
        assert weight.words.nbytes < 1 << 32, f"{weight.words.nbytes} bytes of weights, a kernel counts them in 32 bits"
        self._launch_product(_OF_STEPS, name, weight, len(x), -(-len(weight) // _TILE), x, *args)

    def _launch_product(
        self, source: Path, name: str, weight: QuantizedWeight, num_rows: int, num_tiles: int, x: Tensor, *args: object
    ) -> None:
        """num_rows: the most rows that a block multiplies at a time. num_tiles: the most tiles there can be."""
        assert x.dtype == torch.bfloat16, f"weights of few bits meet rows of bfloat16, not {x.dtype}"
        rows = next(rows for rows in _ROWS if rows >= num_rows)
        kernel, threads = _kernel(source, name, weight.format, weight.group_size, rows, self._chain(), x.device)
        blocks = min(num_tiles, num_multiprocessors(x.device))
        kernel.launch((blocks, 1, 1), threads, x, x.shape[1], *args)

    def _ordered_and_padded(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Return x in the order of the weights' inputs, padded to a multiple of 16 bytes."""
        ordered = self._in_order(x, weight)
        if (padding := -weight.num_in % 8) == 0:
            return ordered
        self.break_chain()
        return functional.pad(ordered, (0, padding))

    def _in_order(self, x: Tensor, weight: QuantizedWeight | None) -> Tensor:
        """Return x in the order of the weights' inputs."""
        if weight is None or weight.order is None:
            return x
        self.break_chain()
        return x.index_select(1, weight.order)


def _weights(weight: QuantizedWeight) -> tuple[Tensor | int, ...]:
    """Return words, scales, bytes from a row to the next, and elements from a group's scales to the next group's."""
    return weight.words, weight.scales, weight.words.stride(0) * weight.words.element_size(), weight.scales.stride(0)


@cache
def _kernel(
    source: Path,
    name: str,
    format: WeightFormat,
    group_size: int,
    rows: int,
    early_start: bool,
    device: torch.device,  # on which it is loaded; a key of the cache
) -> tuple[CudaKernel, int]:
    """Return the compiled kernel and the number of threads of its blocks.

    It has as many multipliers as leave room for two stages each, then as many stages as fit shared memory.
    """
    scales, runs = RUN // group_size if 0 < group_size < RUN else 1, 1 if format == "fp8" else 2
    # bytes of a multiplier's `Stage` and of its sums, as in `quantized.cuh`; then those of `Bundles` in `experts.cu`
    stage = _TILE * 128 + 2 * CODES[format] * rows * 64 + runs * scales * _TILE * 4
    sums = 2 * 8 * 32 * 4
    more = {"MAX_PAIRS": _MAX_PAIRS, "MAX_STEP_ROWS": MAX_BATCH_SIZE} if source == _OF_EXPERTS else {}
    more_bytes = 6 * _MAX_PAIRS + 8 if more else 0
    free_bytes, multipliers = limits().block_bytes - _BARRIER_BYTES - more_bytes, _MAX_MULTIPLIERS
    while multipliers > 1 and free_bytes // multipliers < sums + 2 * stage:
        multipliers //= 2
    stages, threads = min(_MAX_STAGES, (free_bytes // multipliers - sums) // stage), 32 * (multipliers + _FINISHERS)
    defines = {
        **more,
        "THREADS": threads,
        "MULTIPLIERS": multipliers,
        "FORMAT": _FORMATS.index(format),
        "GROUP": group_size,
        "ROWS": rows,
        "STAGES": stages,
        "SQUARES_BLOCK": SQUARES_BLOCK,
    }
    shared_bytes = multipliers * (stages * stage + sums) + more_bytes
    return cuda_kernel(source, name, defines, shared_bytes, early_start), threads
