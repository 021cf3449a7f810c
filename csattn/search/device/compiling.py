"""Compile the kernels of this folder."""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, limits, num_multiprocessors
from csattn.errors import ConfigError
from csattn.search.device.shapes import IndexShape, ListsShape, RowsShape, SketchShape
from csattn.table.lists import CHUNK_KEYS

HERE = Path(__file__).parent
THREADS = 512
MAX_BLOCKS = 256  # as in choice.cuh, which also repeats CHUNK_KEYS, the unit in which lists are stored
QUERY_TYPES = {torch.float32: "float", torch.float16: "u16", torch.bfloat16: "u16"}


def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; on `meta`, where memory is only planned, the current device's."""
    return num_multiprocessors(torch.device("cuda") if device.type == "meta" else device)


def blocks_of_slot(device: torch.device, num_slots: int, max_keys: int, per_multiprocessor: int) -> int:
    """Return how many blocks share the keys of a slot: those of all slots fill the device once."""
    return max(1, min(max_keys // CHUNK_KEYS, MAX_BLOCKS, per_multiprocessor * multiprocessors(device) // num_slots))


def require_queries(q: Tensor, shape: IndexShape | RowsShape, batch_size: int, dtype: torch.dtype) -> None:
    """Raise AssertionError unless q is [batch_size, num_q_heads, head_dim], contiguous and of that dtype."""
    assert q.is_contiguous() and q.dtype == dtype, f"q is {q.dtype}, or not contiguous"
    expected = batch_size, shape.num_index_heads * shape.group_size, shape.head_dim
    assert q.shape == expected, f"q has shape {tuple(q.shape)}, wanted {expected}"


def compiled(
    source: str,  # a file of this folder
    name: str,
    shape: IndexShape | RowsShape,
    query_dtype: torch.dtype = torch.float32,
    threads: int = THREADS,
    shared_bytes: int = 0,
    **more: int,
) -> CudaKernel:
    """Return a kernel compiled for indexes, or plain rows, of this shape.

    Raises ConfigError if a block lacks the shared memory or the queries' dtype is not supported.
    """
    if shared_bytes > (room := limits().block_bytes):
        raise ConfigError(
            f"{shape.group_size} query heads of {shape.head_dim} dimensions that share a KV head take "
            f"{-(-shared_bytes // 1024)} KiB of shared memory in the search, and a thread block on this GPU has "
            f"{room >> 10}; decode on the CPU"
        )
    if query_dtype not in QUERY_TYPES:
        raise ConfigError(f"the search does not take queries of {query_dtype}; use float32, float16 or bfloat16")
    defines: dict[str, object] = {
        "GROUP_SIZE": shape.group_size,
        "NUM_HEADS": shape.num_index_heads,
        "HEAD_DIM": shape.head_dim,
        "THREADS": threads,
        "QUERY": QUERY_TYPES[query_dtype],
        "QUERY_IS_HALF": int(query_dtype == torch.float16),
        **more,
    }
    if isinstance(shape, SketchShape):
        defines |= {"FINE": shape.num_fine, "COARSE": shape.num_coarse}
    elif isinstance(shape, ListsShape):
        defines |= {"SUBSPACES": shape.num_subspaces, "CENTROIDS": shape.num_centroids}
    return cuda_kernel(HERE / source, name, defines, shared_bytes, early_start=True)
