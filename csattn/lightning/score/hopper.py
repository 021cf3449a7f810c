"""Scores on Hopper's tensor cores (wgmma), in CUDA C; other shapes go to `paged.triton_kernels`.

A thread block keeps 256 pairs of a query and a head in shared memory (four queries of 64 heads) and streams tiles of 64
keys past them. Budget of a tile on an H200, in clocks of a multiprocessor: the products take 1024 in bfloat16, 512 in
FP8; a warp scheduler weighs (ReLU, weight, sum) 128 x 32 of them with two instructions each, of which the comparison
runs at half rate, in about 300; keys are 16 or 8 KB, at 16 bytes a clock.

Measured by clocks read within `list_contenders`: 1216 and 937 a tile. Weighing delays the products, whose sums are in
registers too, and what matters is how many registers it writes: with a maximum for every product, one more register, a
tile took 1348 and 958; with an eighth of the weighing, 1065 in bfloat16; removing thirty other instructions gained
nothing. Power is at its limit, too: in bfloat16 the clock falls from 1.8 to 1.54 GHz within 150 ms, and torch's
product, under the same limit, from 800 to 680 TFLOP/s.
"""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel, has_warpgroup_products, num_multiprocessors, tensor_map
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.operands.quantise import FP8

SOURCE = Path(__file__).with_name("hopper.cu")
KEYS = 64  # of a tile
COLUMNS = 256  # pairs of a query and a head
THREADS = 384
_ATOM_BYTES = 128
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, FP8: 2}


def supports(operands: Operands) -> bool:
    """Whether these kernels support the operands: on Hopper, rows of 128 or 256 bytes, 16, 32 or 64 heads."""
    _, num_heads, head_dim = operands.q.shape
    return (
        has_warpgroup_products(operands.q.device)
        and operands.q.dtype in _DTYPES
        and num_heads in (16, 32, 64)
        and head_dim * operands.q.itemsize in (_ATOM_BYTES, 2 * _ATOM_BYTES)
        and all(array.data_ptr() % 16 == 0 for array in (operands.q, operands.k, operands.weights))
    )


def queries_of_tile(num_heads: int) -> int:
    """How many queries a query tile has: a thread block scores one tile at a time."""
    return COLUMNS // num_heads


def tile_max_lens(legal_len: Tensor, num_heads: int) -> Tensor:
    """The most keys that any query of a tile may see: [num_queries] int32 -> [query tiles] int32."""
    each = queries_of_tile(num_heads)
    missing = -len(legal_len) % each
    padded = torch.nn.functional.pad(legal_len, (0, missing)) if missing else legal_len
    return padded.view(-1, each).amax(1)


def write_scores(
    operands: Operands,
    keys: range,  # to be scored; its step is 1, or it begins at 0
    tile_max_lens: Tensor,  # [query tiles] int32, see `tile_max_lens`: later keys are not scored
    out: Tensor,  # [num_queries, width] float32, written; width: whole tiles of 64, for all of the keys
) -> None:
    """Score every step-th key, on torch's current stream; for a step above 1, only within whole blocks of 64 * step."""
    if not len(tile_max_lens) or not len(operands.k):  # the driver makes no tensor maps of empty arrays
        return
    sizes = out.stride(0), len(operands.q), len(operands.k), keys.start, keys.stop, keys.step
    maps = _query_map(operands), _key_map(operands, keys.step)
    arrays = operands.weights, operands.key_scale, tile_max_lens, out
    _launch("write_scores", operands, tile_max_lens, *maps, *arrays, *sizes)


def list_contenders(
    operands: Operands,
    tile_max_lens: Tensor,  # [query tiles] int32
    legal_len: Tensor,  # [num_queries] int32
    step: int,
    threshold_scores: Tensor,  # [num_queries] float32
    threshold_indices: Tensor,  # [num_queries] int32
    lists: Tensor,  # [num_queries, capacity] int64, written
    counts: Tensor,  # [num_queries] int32, read and written
) -> None:
    """Score the keys that `write_scores` with that step leaves out; list those that reach their query's threshold."""
    num_queries, capacity = lists.shape
    maps = _query_map(operands), _key_map(operands, 1), _key_map(operands, step)
    of_keys = operands.weights, operands.key_scale, tile_max_lens
    arrays = *of_keys, legal_len, threshold_scores, threshold_indices, lists, counts
    _launch("list_contenders", operands, tile_max_lens, *maps, *arrays, num_queries, len(operands.k), step, capacity)


def _query_map(operands: Operands) -> object:
    """TMA tensor map of the queries, in boxes of 256 pairs of a query and a head."""
    return tensor_map(operands.q.flatten(0, 1), (COLUMNS, _ATOM_BYTES // operands.q.itemsize))


def _key_map(operands: Operands, step: int) -> object:
    """TMA tensor map of the keys, in boxes of 64 that are step apart; it leaves out the last num_keys % step keys."""
    rows = len(operands.k) // step
    k = operands.k[: rows * step].view(rows, -1) if rows else operands.k  # with no row, no box is loaded
    return tensor_map(k, (KEYS, _ATOM_BYTES // k.itemsize))


def _launch(name: str, operands: Operands, tile_max_lens: Tensor, *args: object) -> None:
    _, num_heads, head_dim = operands.q.shape
    defines = defines_for(operands.q.dtype, num_heads, head_dim)
    # 1024 for alignment, 4096 for weights, thresholds and mbarriers
    shared_bytes = 1024 + (2 * COLUMNS + defines["STAGES"] * KEYS) * head_dim * operands.q.itemsize + 4096
    kernel = cuda_kernel(SOURCE, name, defines, shared_bytes, early_start=True, architecture="sm_90a")
    kernel.launch((min(len(tile_max_lens), num_multiprocessors(operands.q.device)), 1, 1), THREADS, *args)


def defines_for(dtype: torch.dtype, num_heads: int, head_dim: int) -> dict[str, int]:
    """The macros that the kernels are compiled with."""
    return {
        "DTYPE": _DTYPES[dtype],
        "HEAD_DIM": head_dim,
        "COLUMNS": COLUMNS,
        "HEADS": num_heads,
        "STAGES": 4 if head_dim * dtype.itemsize > _ATOM_BYTES else 8,
        "THREADS": THREADS,
    }
