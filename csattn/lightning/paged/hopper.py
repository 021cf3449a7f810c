"""Indexer scores of a key cache on Hopper: `hopper.cu`, for 64 heads of 128 channels and pages of 64 keys in FP8.

A thread block scores up to 2 pages, loaded at the same time; several blocks share a multiprocessor. The arguments are
those of `score.score_pages`.
"""

from pathlib import Path

from torch import Tensor

from csattn.cuda import cuda_kernel, has_warpgroup_products, num_multiprocessors
from csattn.lightning.operands.quantise import FP8
from csattn.lightning.paged.cache import HEAD_DIM, PAGE_BYTES, PAGE_SIZE
from csattn.lightning.topk.grouped import MAX_ROWS, GroupMaxima

SOURCE = Path(__file__).with_name("hopper.cu")
HEADS = 64
THREADS = 128
BLOCKS_PER_SM = 8
MIN_PAGES = 512
PAGES = 2  # per thread block, at most
SHARED_BYTES = HEADS * HEAD_DIM + PAGES * (PAGE_BYTES + 8 + 4) + 1024  # 1024: for alignment


def supports(q: Tensor, values: Tensor, scales: Tensor, pages: Tensor) -> bool:
    """Whether the kernel supports this device, these shapes, and this layout: keys and scales in pages of a key cache.

    For more queries over fewer pages, whose blocks would run in several waves, Triton's tiles are as fast or faster.
    """
    return (
        q.is_cuda
        and len(q) <= MAX_ROWS
        and pages.shape[1] >= MIN_PAGES
        and q.dtype == FP8
        and tuple(q.shape[1:]) == (HEADS, HEAD_DIM)
        and tuple(values.shape[1:]) == (PAGE_SIZE, HEAD_DIM)
        and values.stride(0) == scales.stride(0) * scales.itemsize == PAGE_BYTES
        and scales.data_ptr() - values.data_ptr() == PAGE_SIZE * HEAD_DIM
        and values.data_ptr() % 16 == 0 == q.data_ptr() % 16
        and has_warpgroup_products(q.device)
    )


def score_on_hopper(
    q: Tensor,  # [num_queries, 64, 128]
    weights: Tensor,
    values: Tensor,  # [num_pages, 64, 128], each page's scales right after it
    pages: Tensor,
    kv_lens: Tensor,
    longer_than: int,
    out: Tensor,
    group_maxima: GroupMaxima | None = None,  # each group's best score, written
) -> None:
    """Enqueue scoring on torch's current stream."""
    num_queries, max_pages = pages.shape
    if num_queries == 0 or max_pages == 0:
        return
    places = BLOCKS_PER_SM * num_multiprocessors(q.device)
    pages_each = min(PAGES, -(-num_queries * max_pages // places))
    of_maxima: tuple[Tensor | int, ...] = (0, 0, 16, 0, 0)
    if group_maxima is not None:
        group_pages = max(1, group_maxima.group_keys // 16)
        pages_each = -(-pages_each // group_pages) * group_pages  # a group is scored by one thread block
        keys, slots = group_maxima.keys, group_maxima.slots
        of_maxima = keys, keys.stride(0), group_maxima.group_keys, slots, 2 * slots.shape[1]
    defines = {"THREADS": THREADS, "PAGES": PAGES}
    kernel = cuda_kernel(SOURCE, "score_pages", defines, SHARED_BYTES, early_start=True, architecture="sm_90a")
    grid = -(-max_pages // pages_each), num_queries, 1
    sizes = pages.stride(0), max_pages, len(values), longer_than, pages_each
    kernel.launch(grid, THREADS, q, weights, values, pages, kv_lens, out, *sizes, *of_maxima)
