"""HISA's candidates on a CUDA device, in one launch: `hisa_choice.cu`."""

from pathlib import Path

from torch import Tensor

from csattn.cuda import cuda_kernel

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("intrinsics.cu", "topk_common.cu", "hisa_choice.cu"))
FEW_THREADS, MANY_THREADS = 128, 1024  # of a query
MANY_BLOCKS = 4096  # that more threads choose from


def choose_candidates(
    scores: Tensor,  # [num_queries, max_blocks] float32, rows any distance apart; of blocks that a query sees
    kv_lens: Tensor,  # [num_queries] int32
    block_size: int,
    ends: tuple[int, int],  # blocks that are always chosen: of the first, and of the last that a query sees
    candidates: Tensor,  # [num_queries, num_blocks] int32, written
    num_keys: Tensor,  # [num_queries] int32, written
) -> None:
    """As `hisa.best_blocks`, on torch's current stream; the scores stay as they are."""
    num_queries, max_blocks = scores.shape
    if not num_queries:
        return
    threads = FEW_THREADS if max_blocks <= MANY_BLOCKS else MANY_THREADS
    each = 1 << (max(1, -(-max_blocks // threads)) - 1).bit_length()
    kernel = cuda_kernel(SOURCES, "choose_candidates", {"THREADS": threads, "EACH": each}, early_start=True)
    arrays = candidates, candidates.shape[1], num_keys
    kernel.launch(
        (num_queries, 1, 1), threads, scores, scores.stride(0), max_blocks, kv_lens, block_size, *ends, *arrays
    )
