"""How the weights of a product are divided among Triton programs: the block sizes that measured best."""

from typing import Any

import triton
from torch import Tensor, bfloat16, float32

from csattn.cuda import limits
from csattn.models.quantized_weight import CODES, RUN, WeightFormat
from csattn.models.weights import Linear

MAX_BATCH_SIZE = 64
BLOCK_N = 64  # rows of the weights that a program owns
# At most so many programs share a product by split-K: two fit on each multiprocessor of an H200. It is a constant, not
# a property of the device, because it decides the order of sums.
MAX_SPLIT_PROGRAMS = 264
_NUM_STAGES: dict[WeightFormat | None, int] = {None: 4, "fp8": 5, "int4": 6}  # of the pipeline: loading, and multiplied
_OTHER_BYTES = 20 << 10  # the most shared memory that a program needs besides those stages


def tiles(linear: Linear, x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid (tiles of outputs, split-K programs of each tile) and the constants of a kernel for x @ weight.T.

    The grid depends on nothing but the shape and the format of the weights.
    """
    weight, quantized, batch_size = linear.weight, linear.quantized, len(x)
    assert batch_size <= MAX_BATCH_SIZE, f"{batch_size} rows, at most {MAX_BATCH_SIZE} fit a program"
    block_k = 256 // weight.element_size() if quantized is None else RUN
    num_tiles, split_k = -(-len(weight) // BLOCK_N), 1
    while num_tiles * split_k * 2 <= MAX_SPLIT_PROGRAMS and split_k * 2 * block_k <= linear.num_in and split_k < 8:
        split_k *= 2
    format = None if quantized is None else quantized.format
    block_m = max(16, triton.next_power_of_2(batch_size))
    words = BLOCK_N * block_k // (1 if format is None else CODES[format])
    stage_bytes = words * weight.element_size() + block_m * block_k * x.element_size()
    return (num_tiles, split_k), {
        "BLOCK_M": block_m,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": block_k,
        "SPLIT_K": split_k,
        "EVEN_K": linear.num_in % (block_k * split_k) == 0,
        "FORMAT": format or "plain",
        "GROUP": 0 if quantized is None else quantized.group_size,
        "ZEROS": quantized is not None and quantized.has_zeros,
        "NATIVE": x.is_cuda and x.dtype == bfloat16,
        "DOT_PRECISION": "ieee" if x.dtype == float32 else "tf32",
        "num_warps": 4,
        "num_stages": min(_NUM_STAGES[format], 1 + max(1, (limits().block_bytes - _OTHER_BYTES) // stage_bytes)),
    }
