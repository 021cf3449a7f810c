"""Scores of HISA's candidates on Hopper's tensor cores (wgmma): `score.cu`.

The kernel loads a block of keys, then the queries that it is a candidate of: a query of 64 heads has half as many bytes
as a block of 128 keys, and these come from L2.
"""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors, tensor_map
from csattn.lightning.hisa.choice import ITEM_QUERIES, BlockLists
from csattn.lightning.hisa.triton_kernels import max_blocks_on_device
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.score import hopper

SOURCE = Path(__file__).with_name("score.cu")
BLOCK_SIZES = (64, 128)
_ATOM_BYTES = 128
_ROOM_BYTES = 220 << 10  # of shared memory, for keys and queries


def supports(operands: Operands, block_size: int) -> bool:
    """Whether the kernel supports the operands: as `hopper.supports`, and two blocks must fit beside the queries."""
    return (
        operands.key_scale is not None
        and block_size in BLOCK_SIZES
        and _stages(block_size, operands.q.shape[2] * operands.q.itemsize) > 0
        and hopper.supports(operands)
    )


def score_blocks(operands: Operands, kv_lens: Tensor, block_size: int) -> Tensor:
    """Return scores of block keys, the keys of `operands`: [num_queries, whole tiles of 64] float32.

    Those of blocks that none of a tile's queries sees are not written.
    """
    num_queries, num_blocks = len(operands.q), len(operands.k)
    each = hopper.queries_of_tile(operands.q.shape[1])
    tile_max_lens = torch.empty(-(-num_queries // each), dtype=torch.int32, device=kv_lens.device)
    max_blocks_on_device(kv_lens, block_size, each, tile_max_lens)
    width = -(-num_blocks // hopper.KEYS) * hopper.KEYS
    scores = torch.empty(num_queries, width, dtype=torch.float32, device=kv_lens.device)
    hopper.write_scores(operands, range(num_blocks), tile_max_lens, scores)
    return scores


def score_candidates(
    operands: Operands,  # of one sequence
    block_size: int,
    num_candidates: int,  # of a query
    lists: BlockLists,  # of all blocks
) -> Tensor:
    """Return scores [num_queries, num_candidates * block_size] float32, with the bits of `score.hopper.write_scores`.

    Those of candidates in no list are not written.
    """
    num_queries = len(operands.q)
    out = torch.empty(num_queries, num_candidates * block_size, dtype=torch.float32, device=operands.q.device)
    kernel = _kernel(operands.q.dtype, operands.q.shape[1], operands.q.shape[2], block_size)
    assert operands.key_scale is not None
    kernel.launch(
        (num_multiprocessors(operands.q.device), 1, 1),
        hopper.THREADS,
        tensor_map(operands.q.flatten(0, 1), (operands.q.shape[1], _ATOM_BYTES // operands.q.itemsize)),
        tensor_map(operands.k, (hopper.KEYS, _ATOM_BYTES // operands.k.itemsize)),
        *(operands.weights, operands.key_scale),
        *(lists.entries, lists.counts, lists.items, lists.counts[-2:], lists.counts[-1:]),
        *(out, num_queries, num_candidates, len(operands.k)),
    )
    return out


def defines_for(dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """The macros that the kernel is compiled with."""
    stages = _stages(block_size, head_dim * dtype.itemsize)
    own = {"STAGES": stages, "BLOCK_KEYS": block_size, "ITEM_QUERIES": ITEM_QUERIES}
    return hopper.defines_for(dtype, num_heads, head_dim) | own


def _stages(block_size: int, row_bytes: int) -> int:
    """How many tiles of queries fit in shared memory: an even number."""
    return (_ROOM_BYTES - 2 * block_size * row_bytes) // (2 * hopper.COLUMNS * (row_bytes + 4)) * 2


def _kernel(dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int) -> CudaKernel:
    defines = defines_for(dtype, num_heads, head_dim, block_size)
    row_bytes = head_dim * dtype.itemsize
    stages_bytes = defines["STAGES"] * hopper.COLUMNS * (row_bytes + 4)
    # 1024 for alignment, 2048 for descriptions of tiles and mbarriers
    shared_bytes = 1024 + stages_bytes + 2 * block_size * row_bytes + 2048
    return cuda_kernel(SOURCE, "score_candidates", defines, shared_bytes, early_start=True, architecture="sm_90a")
