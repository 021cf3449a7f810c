"""The exact k best of a few long rows, ascending, where the best of groups of scores are known: `topk_lists.cu`.

`page_score_hopper` writes scores and groups' best together; one launch here makes a choice of them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel

PARTS = ("intrinsics.cu", "topk_common.cu", "topk_range.cu", "topk_lists.cu", "topk_collect.cu", "topk_choose.cu")
SOURCES = tuple(Path(__file__).with_name(name) for name in PARTS)
THREADS = 1024
SLOTS = 5 * THREADS  # of a row, for what its blocks list
ENTRIES = 4096  # that one block chooses among in its shared memory
MAX_TILES = 64  # of a row
MIN_GROUPS, MAX_GROUPS = 4096, 8192
GROUPS_OF_SPAN = 4  # of the pages that have groups in common
MAX_ROWS = 2  # of more the blocks would be many, and the lists large
PAGE_SIZE = 64  # of the pages that groups are of
MAX_GROUP_PAGES = 2
SHARED_BYTES = 8 * ENTRIES + 4 * (8192 + 2048) + 4 * MAX_TILES + 1024  # at least `Shared` of the source


@dataclass(frozen=True, slots=True)
class GroupBests:
    """Of each row the best score of every group: 16 keys at one place of each of group_pages neighbouring pages."""

    keys: Tensor  # [rows, num_groups] int32: as `order_of` has them in CUDA C, 0: no score
    group_pages: int  # a power of two
    slots: Tensor  # [rows, SLOTS] int64: 0, for one choice

    @classmethod
    def make(cls, block_table: Tensor, k: int) -> "GroupBests | None":
        """For scores of these pages [rows, max_pages]; None where other ways to choose suit them better.

        A row has from 4096 to 8192 groups, at least twice as many as are chosen: then a floor that k of them reach is
        not far below the k-th best score.
        """
        rows, max_pages = block_table.shape
        group_pages = 1
        while max_pages >= 2048 * group_pages and group_pages < MAX_GROUP_PAGES:
            group_pages *= 2
        num_groups = GROUPS_OF_SPAN * -(-max_pages // group_pages)
        if rows > MAX_ROWS or not max(2 * k, MIN_GROUPS) <= num_groups <= MAX_GROUPS:
            return None
        keys = torch.empty(rows, num_groups, dtype=torch.int32, device=block_table.device)
        return cls(keys, group_pages, torch.empty(rows, SLOTS, dtype=torch.int64, device=block_table.device))


def choose_listed(
    scores: Tensor,  # [rows, max_pages * 64] float32
    bests: GroupBests,
    legal_len: Tensor,  # [rows] int32
    pages: Tensor | None,  # [rows, max_pages] int32
    out: Tensor,  # [rows, k] int32, contiguous, written
) -> None:
    """Enqueue on torch's current stream. Definition: `topk.top_k` with order="position" and pages of 64."""
    rows, length = scores.shape
    num_tiles = -(-length // (4 * THREADS))
    listed = torch.empty(rows, num_tiles, 4 * THREADS, dtype=torch.int64, device=scores.device)
    defines = {
        "THREADS": THREADS,
        "SLOTS": SLOTS,
        "ENTRIES": ENTRIES,
        "MAX_TILES": MAX_TILES,
        "MAX_GROUPS": MAX_GROUPS,
    }
    kernel = cuda_kernel(SOURCES, "choose_listed", defines, SHARED_BYTES, early_start=True)
    kernel.launch(
        (num_tiles, rows, 1),
        THREADS,
        scores,
        scores.stride(0),
        length,
        legal_len,
        bests.keys,
        bests.keys.stride(0),
        PAGE_SIZE * bests.group_pages,
        0 if pages is None else pages,
        0 if pages is None else pages.stride(0),
        PAGE_SIZE.bit_length() - 1,
        bests.slots,
        listed,
        out,
        out.shape[1],
    )
