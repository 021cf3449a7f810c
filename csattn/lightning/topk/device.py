"""The exact top-k of every row on a CUDA device, in one launch.

Few rows, or short ones, are kept in registers while a radix select finds the k-th best (`radix.cu`). Of many long ones
each score is read once, and those that may be among the best are buffered (`buffered.cu`).
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, limits, num_multiprocessors

HERE = Path(__file__).parent
TILE_SOURCE, DIGIT_SOURCE = HERE / "buffered.cu", HERE / "radix.cu"
MAX_K = 2048
MAX_CLUSTER = 8  # thread blocks that share a row; more are not portable
# By cluster size, the share of all multiprocessors that clusters can occupy at a time: a cluster stays within one GPC,
# which has 14 to 18 multiprocessors.
CLUSTERED_SHARE = {2: 1.0, 4: 0.9, 8: 0.75}
OTHER_SHARED_BYTES = 2 * 2048 * 4 + 1024  # of a block, besides its entries


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A thread block of `buffered.cu`, which reads each score once."""

    threads: int
    vectors: int  # of four scores, that a thread reads of a tile
    capacity: int  # entries that a block can buffer: at least its k best and a tile
    per_sm: int  # blocks per multiprocessor

    @property
    def tile_len(self) -> int:
        """Scores of a tile."""
        return 4 * self.vectors * self.threads

    @property
    def shared_bytes(self) -> int:
        return 8 * self.capacity + OTHER_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class DigitShape:
    """A thread block of `radix.cu`, which keeps scores in registers."""

    threads: int
    vectors: int  # of four scores, that a thread keeps
    per_sm: int  # blocks per multiprocessor

    @property
    def num_kept(self) -> int:
        """How many scores a block keeps."""
        return 4 * self.vectors * self.threads

    def shared_bytes(self, by_position: bool) -> int:
        """Bytes for lists of 128 entries per warp, for bins and, by score, for all chosen entries."""
        return 8 * 128 * self.threads // 32 + (0 if by_position else 8 * MAX_K) + OTHER_SHARED_BYTES


MANY_ROWS = BlockShape(512, 2, 11264, per_sm=2)  # one block reads while the other selects
MANY_ROWS_OF_SMALL = BlockShape(512, 2, 8192, per_sm=1)  # where a block has less shared memory
FEW_ROWS = DigitShape(1024, 4, per_sm=1)
SHORT_ROWS = DigitShape(512, 4, per_sm=2)


def select_on_device(
    scores: Tensor,  # [rows, length] float32; rows may have any stride
    legal_len: Tensor | None,  # [rows] int32
    by_position: bool,
    pages: Tensor | None,  # [rows, num_pages] int32
    page_size: int,
    out: Tensor,  # [rows, k] int32, contiguous, written
) -> None:
    """Enqueue the selection on torch's current stream. Definition and arguments: `select.top_k`."""
    (rows, length), k = scores.shape, out.shape[1]
    if rows == 0:
        return
    shape, cluster = _choose_blocks(rows, length, num_multiprocessors(scores.device))
    kernel = _kernel(shape, cluster, by_position)
    kernel.launch(
        (rows * cluster, 1, 1),
        shape.threads,
        *(scores, scores.stride(0), length, legal_len),
        *(pages, 0 if pages is None else pages.stride(0), page_size, out, k),
    )


def _choose_blocks(rows: int, length: int, num_sms: int) -> tuple[BlockShape | DigitShape, int]:
    """Return the shape of thread blocks, and how many share a row."""
    most = MAX_CLUSTER if limits().is_hopper else 1
    if length <= SHORT_ROWS.num_kept:
        return SHORT_ROWS, 1
    if 2 * rows > num_sms:  # each multiprocessor has a row or two
        if length <= FEW_ROWS.num_kept:
            return FEW_ROWS, 1
        blocks = MANY_ROWS if MANY_ROWS.shared_bytes <= limits().block_bytes else MANY_ROWS_OF_SMALL
        return blocks, min(most, 2 if rows <= num_sms and length >= 4 * blocks.tile_len else 1)
    cluster = 1
    while (
        2 * cluster <= most
        and 2 * cluster * rows <= CLUSTERED_SHARE[2 * cluster] * num_sms
        and cluster * FEW_ROWS.num_kept <= length
    ):
        cluster *= 2
    return FEW_ROWS, cluster


def _kernel(shape: BlockShape | DigitShape, cluster: int, by_position: bool) -> CudaKernel:
    defines = {
        "THREADS": shape.threads,
        "CLUSTER": cluster,
        "VECTORS": shape.vectors,
        "BLOCKS_PER_SM": shape.per_sm,
        "BY_POSITION": int(by_position),
    }
    if isinstance(shape, DigitShape):
        defines |= {"MAX_K": MAX_K}
        return cuda_kernel(DIGIT_SOURCE, "select_by_digits", defines, shape.shared_bytes(by_position), early_start=True)
    defines |= {"CAPACITY": shape.capacity}
    return cuda_kernel(TILE_SOURCE, "select_top_k", defines, shape.shared_bytes, early_start=True)
