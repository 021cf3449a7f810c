"""The exact k best of every row on a CUDA device: one launch, which reads every score once."""

from pathlib import Path

from torch import Tensor

from csattn.cuda import cuda_kernel, num_multiprocessors

ENTRY_SOURCES = tuple(Path(__file__).with_name(name) for name in ("intrinsics.cu", "topk_entries.cu", "topk_write.cu"))
SOURCES = (*ENTRY_SOURCES, Path(__file__).with_name("topk.cu"))
MAX_K = 2048
THREADS = 512
VECTORS = 2  # of four scores, that a thread has of a tile
CAPACITY = 11264  # entries that a block keeps: as many as leave room for two blocks on a multiprocessor
BLOCKS_PER_SM = 2
MAX_CLUSTER = 8  # blocks that work on one row; more are not portable
OTHER_SHARED_BYTES = 2 * 2048 * 4 + 1024  # of a block, besides its entries

assert CAPACITY - THREADS * 4 * VECTORS > MAX_K, "a block keeps its k best and has room for a tile"


def select_on_device(
    scores: Tensor,  # [rows, length] float32; rows may be any number of scores apart
    legal_len: Tensor | None,  # [rows] int32
    by_position: bool,
    pages: Tensor | None,  # [rows, num_pages] int32
    page_size: int,
    out: Tensor,  # [rows, k] int32, contiguous, written
) -> None:
    """Enqueue on torch's current stream. Definition and meaning of the arguments: `topk.top_k`."""
    (rows, length), k = scores.shape, out.shape[1]
    if rows == 0:
        return
    cluster = _cluster_size(rows, length, num_multiprocessors(scores.device))
    defines = {
        "THREADS": THREADS,
        "CLUSTER": cluster,
        "VECTORS": VECTORS,
        "CAPACITY": CAPACITY,
        "BY_POSITION": int(by_position),
    }
    kernel = cuda_kernel(SOURCES, "select_top_k", defines, 8 * CAPACITY + OTHER_SHARED_BYTES, early_start=True)
    kernel.launch(
        (rows * cluster, 1, 1),
        THREADS,
        scores,
        scores.stride(0),
        length,
        _address(legal_len),
        _address(pages),
        0 if pages is None else pages.stride(0),
        page_size,
        out,
        k,
    )


def _cluster_size(rows: int, length: int, num_sms: int) -> int:
    """As many blocks for a row as the device has places, while each has at least two tiles."""
    cluster = 1
    while (
        2 * cluster <= MAX_CLUSTER
        and 2 * cluster * rows <= BLOCKS_PER_SM * num_sms
        and 4 * cluster * THREADS * 4 * VECTORS <= length
    ):
        cluster *= 2
    return cluster


def _address(array: Tensor | None) -> Tensor | int:
    """What a kernel takes for an array that may be missing."""
    return 0 if array is None else array
