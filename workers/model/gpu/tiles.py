"""How a product's weights are dealt out to programs: the block sizes that measured best."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor, bfloat16, float32

from csattn.models.quantized_weight import RUN, WeightFormat
from csattn.models.weights import Linear

MAX_BATCH_SIZE = 64
BLOCK_N = 64  # rows of the weights that a program owns
# Programs among which one product is split: two fit on each multiprocessor of an H200. A constant, not a property of
# the device at hand: it decides the order of sums.
MAX_SPLIT_PROGRAMS = 264
_NUM_STAGES: dict[WeightFormat | None, int] = {None: 4, "fp8": 5, "int4": 6}  # blocks on their way


@dataclass(frozen=True, slots=True)
class Tiles:
    """By the shape and the format of the weights alone."""

    num_tiles: int
    split_k: int  # programs that share a tile's columns
    block_k: int
    even_k: bool
    format: WeightFormat | None
    group_size: int
    has_zeros: bool

    @classmethod
    def of(cls, linear: Linear) -> "Tiles":
        weight, quantized = linear.weight, linear.quantized
        num_rows, num_k = len(weight), linear.num_in
        block_k = 256 // weight.element_size() if quantized is None else RUN
        num_tiles = -(-num_rows // BLOCK_N)
        split_k = 1
        while num_tiles * split_k * 2 <= MAX_SPLIT_PROGRAMS and split_k * 2 * block_k <= num_k and split_k < 8:
            split_k *= 2
        even_k = num_k % (block_k * split_k) == 0
        shape = num_tiles, split_k, block_k, even_k
        if quantized is None:
            return cls(*shape, None, 0, False)
        return cls(*shape, quantized.format, quantized.group_size, quantized.has_zeros)

    def constants(self, x: Tensor) -> dict[str, Any]:
        batch_size = len(x)
        assert batch_size <= MAX_BATCH_SIZE, f"{batch_size} rows, at most {MAX_BATCH_SIZE} fit a program"
        return {
            "BLOCK_M": max(16, triton.next_power_of_2(batch_size)),
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": self.block_k,
            "SPLIT_K": self.split_k,
            "EVEN_K": self.even_k,
            "FORMAT": self.format or "plain",
            "GROUP": self.group_size,
            "ZEROS": self.has_zeros,
            "NATIVE": x.is_cuda and x.dtype == bfloat16,
            "DOT_PRECISION": "ieee" if x.dtype == float32 else "tf32",
            "num_warps": 4,
            "num_stages": _NUM_STAGES[self.format],
        }
