"""How a product's weights are dealt out to programs: the block sizes that measured best."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor, float32

from workers.model.ops import SQUARES_BLOCK

MAX_BATCH_SIZE = 64
BLOCK_N = SQUARES_BLOCK  # rows of the weights that a program owns: a tile of `linear_add` is a part of the squares
# Programs among which one product is split: two fit on each multiprocessor of an H200. A constant, not a property of
# the device at hand: it decides the order of sums.
MAX_SPLIT_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class Tiles:
    """By the shape and the element size of the weights alone."""

    num_tiles: int
    split_k: int  # programs that share a tile's columns
    block_k: int
    even_k: bool
    exact: bool  # float32

    @classmethod
    def of(cls, weight: Tensor) -> "Tiles":
        num_rows, num_k = weight.shape
        block_k = 256 // weight.element_size()
        num_tiles = -(-num_rows // BLOCK_N)
        split_k = 1
        while num_tiles * split_k * 2 <= MAX_SPLIT_PROGRAMS and split_k * 2 * block_k <= num_k and split_k < 8:
            split_k *= 2
        even_k = num_k % (block_k * split_k) == 0
        return cls(num_tiles, split_k, block_k, even_k, weight.dtype == float32)

    def constants(self, batch_size: int) -> dict[str, Any]:
        assert batch_size <= MAX_BATCH_SIZE, f"{batch_size} rows, at most {MAX_BATCH_SIZE} fit a program"
        return {
            "BLOCK_M": max(16, triton.next_power_of_2(batch_size)),
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": self.block_k,
            "SPLIT_K": self.split_k,
            "EVEN_K": self.even_k,
            "DOT_PRECISION": "ieee" if self.exact else "tf32",
            "num_warps": 4,
            "num_stages": 4,
        }
