"""How a product's weights are dealt out to programs: the block sizes that measured best."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor, float32

from csattn.models.weights import Linear

MAX_BATCH_SIZE = 64
BLOCK_N = 64  # rows of the weights that a program owns
# Programs among which one product is split: two fit on each multiprocessor of an H200. A constant, not a property of
# the device at hand: it decides the order of sums.
MAX_SPLIT_PROGRAMS = 264
_NUM_STAGES = 4  # blocks on their way


@dataclass(frozen=True, slots=True)
class Tiles:
    """By the shape of the weights alone."""

    num_tiles: int
    split_k: int  # programs that share a tile's columns
    block_k: int
    even_k: bool

    @classmethod
    def of(cls, linear: Linear) -> "Tiles":
        num_rows, num_k = linear.weight.shape
        block_k = 256 // linear.weight.element_size()
        num_tiles = -(-num_rows // BLOCK_N)
        split_k = 1
        while num_tiles * split_k * 2 <= MAX_SPLIT_PROGRAMS and split_k * 2 * block_k <= num_k and split_k < 8:
            split_k *= 2
        return cls(num_tiles, split_k, block_k, num_k % (block_k * split_k) == 0)

    def constants(self, x: Tensor) -> dict[str, Any]:
        batch_size = len(x)
        assert batch_size <= MAX_BATCH_SIZE, f"{batch_size} rows, at most {MAX_BATCH_SIZE} fit a program"
        return {
            "BLOCK_M": max(16, triton.next_power_of_2(batch_size)),
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": self.block_k,
            "SPLIT_K": self.split_k,
            "EVEN_K": self.even_k,
            "DOT_PRECISION": "ieee" if x.dtype == float32 else "tf32",
            "num_warps": 4,
            "num_stages": _NUM_STAGES,
        }
