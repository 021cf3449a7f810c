"""The exact k best of every row on a CUDA device: one launch, which reads every score once."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from csattn.cuda import cuda_kernel, num_multiprocessors

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("intrinsics.cu", "topk_entries.cu", "topk_write.cu", "topk.cu")
)
MAX_K = 2048
MAX_CLUSTER = 8  # blocks that work on one row; more are not portable
OTHER_SHARED_BYTES = 2 * 2048 * 4 + 1024  # of a block, besides its entries


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block is like."""

    threads: int
    vectors: int  # of four scores, that a thread has of a tile
    capacity: int  # entries that a block keeps: its k best, and room for a tile at least
    per_sm: int  # blocks of a multiprocessor

    @property
    def tile_len(self) -> int:
        """Scores of a tile."""
        return 4 * self.vectors * self.threads

    @property
    def shared_bytes(self) -> int:
        return 8 * self.capacity + OTHER_SHARED_BYTES


MANY_ROWS = BlockShape(512, 2, 11264, per_sm=2)  # one block reads while the other selects
FEW_ROWS = BlockShape(1024, 2, 24576, per_sm=1)  # what a block reads of a row of 128K in a cluster of 8 fits as it is


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
    shape, cluster = _choose_blocks(rows, length, num_multiprocessors(scores.device))
    defines = {
        "THREADS": shape.threads,
        "CLUSTER": cluster,
        "VECTORS": shape.vectors,
        "CAPACITY": shape.capacity,
        "BLOCKS_PER_SM": shape.per_sm,
        "BY_POSITION": int(by_position),
    }
    kernel = cuda_kernel(SOURCES, "select_top_k", defines, shape.shared_bytes, early_start=True)
    kernel.launch(
        (rows * cluster, 1, 1),
        shape.threads,
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


def _choose_blocks(rows: int, length: int, num_sms: int) -> tuple[BlockShape, int]:
    """Blocks, and how many for a row: as many as the device has places, while each has at least two tiles."""
    shape = FEW_ROWS if 2 * rows <= num_sms and length >= 4 * FEW_ROWS.tile_len else MANY_ROWS
    cluster = 1
    while (
        2 * cluster <= MAX_CLUSTER
        and 2 * cluster * rows <= shape.per_sm * num_sms
        and 4 * cluster * shape.tile_len <= length
    ):
        cluster *= 2
    return shape, cluster


def _address(array: Tensor | None) -> Tensor | int:
    """What a kernel takes for an array that may be missing."""
    return 0 if array is None else array
