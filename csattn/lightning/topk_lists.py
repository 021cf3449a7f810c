"""The exact k best of a few long rows, ascending, where the best of groups of scores are known: `topk_lists.cu`.

`page_score_hopper` writes scores and groups' best together; one launch here makes a choice of them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel

PARTS = ("intrinsics.cu", "topk_common.cu", "topk_lists.cu", "topk_collect.cu", "topk_choose.cu")
SOURCES = tuple(Path(__file__).with_name(name) for name in PARTS)
THREADS = 256
ENTRIES = 4096  # that one block chooses among in its shared memory
MAX_TILES = 256  # of a row
MAX_GROUPS = 8192
MAX_ROWS = 8  # of more the blocks would be many, and the lists large
PAGE_SIZE = 64  # of the pages that groups are of
MAX_GROUP_PAGES = 2
COUNTERS = 2048 + 4  # bins, and the blocks that are done
SHARED_BYTES = 8 * ENTRIES + 4 * (2048 + 256) + 4 * MAX_TILES + 1024


@dataclass(frozen=True, slots=True)
class GroupBests:
    """Of each row the best score of every group: 16 keys at the same place of group_pages pages, or 8 of a page."""

    keys: Tensor  # [rows, num_groups] int32: as `order_of` has them in CUDA C, 0: no score
    group_pages: int  # a power of two; 0: two groups of 8 keys
    counters: Tensor  # [rows, COUNTERS] int32: 0, for one choice

    @classmethod
    def make(cls, rows: int, max_pages: int, device: torch.device) -> "GroupBests":
        """From 4096 to 8192 groups of a row."""
        group_pages = 0
        while max(1, 2 * group_pages) <= min(MAX_GROUP_PAGES, max_pages // 1024):
            group_pages = max(1, 2 * group_pages)
        num_groups = 4 * -(-max_pages // group_pages) if group_pages else 8 * max_pages
        keys = torch.empty(rows, num_groups, dtype=torch.int32, device=device)
        return cls(keys, group_pages, torch.empty(rows, COUNTERS, dtype=torch.int32, device=device))


def takes(rows: int, max_pages: int, k: int) -> bool:
    """Whether there are enough groups, and not too many; and so few rows that this is worth its while."""
    return rows <= MAX_ROWS and 4 * k <= 16 * max_pages and 512 <= max_pages <= MAX_GROUPS * MAX_GROUP_PAGES // 4


def choose_listed(
    scores: Tensor,  # [rows, max_pages * 64] float32
    bests: GroupBests,
    legal_len: Tensor,  # [rows] int32
    pages: Tensor | None,  # [rows, max_pages] int32
    out: Tensor,  # [rows, k] int32, contiguous, written
) -> None:
    """Enqueue on torch's current stream. Definition: `topk.top_k` with order="position" and pages of 64."""
    rows, length = scores.shape
    tile_len = 4 * THREADS * -(-length // (4 * THREADS * MAX_TILES))
    num_tiles = -(-length // tile_len)
    listed = torch.empty(rows, num_tiles * tile_len, dtype=torch.int64, device=scores.device)
    counts = torch.empty(rows, num_tiles, dtype=torch.int32, device=scores.device)
    defines = {"THREADS": THREADS, "ENTRIES": ENTRIES, "MAX_TILES": MAX_TILES, "MAX_GROUPS": MAX_GROUPS}
    kernel = cuda_kernel(SOURCES, "choose_listed", defines, SHARED_BYTES, early_start=True)
    span, groups = PAGE_SIZE * max(1, bests.group_pages), 4 if bests.group_pages else 8
    kernel.launch(
        (num_tiles, rows, 1),
        THREADS,
        scores,
        scores.stride(0),
        length,
        legal_len,
        bests.keys,
        bests.keys.stride(0),
        span,
        groups,
        0 if pages is None else pages,
        0 if pages is None else pages.stride(0),
        PAGE_SIZE.bit_length() - 1,
        listed,
        counts,
        tile_len,
        bests.counters,
        out,
        out.shape[1],
    )
