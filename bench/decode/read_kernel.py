"""A kernel that reads memory and writes next to nothing, to measure the read bandwidth of a device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
BLOCKS_PER_PROGRAM = 16


@triton.jit
def _read(source, out, num_words, block: tl.constexpr, blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (block * blocks)
    largest = tl.full([block], -(2**31), tl.int32)
    for i in range(blocks):
        at = start + i * block + tl.arange(0, block)
        largest = tl.maximum(largest, tl.load(source + at, mask=at < num_words, other=-(2**31)))
    tl.atomic_max(out, tl.max(largest))


def read_all(source: Tensor, out: Tensor) -> None:
    """Set out [1] int32 to the maximum of itself and of source [num_words] int32."""
    assert source.dtype == torch.int32 and out.dtype == torch.int32
    programs = -(-len(source) // (BLOCK * BLOCKS_PER_PROGRAM))
    _read[(programs,)](source, out, len(source), BLOCK, BLOCKS_PER_PROGRAM, num_warps=8)
