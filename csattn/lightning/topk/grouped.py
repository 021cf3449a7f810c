"""The exact top-k of a few long rows, in ascending order of index, given the best score of each group: `grouped.cu`.

`paged.hopper` writes scores and groups' best together; one launch here chooses from them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel

SOURCE = Path(__file__).with_name("grouped.cu")
THREADS = 1024
SLOTS = 5 * THREADS  # of a row, for the scores that its blocks list
ENTRIES = 8192  # that fit in the shared memory of the block that chooses
MAX_TILES = 64  # of a row
MIN_GROUPS, MAX_GROUPS = 4096, 8192
MANY_GROUPS = 640  # if the best of more share the k-th's digit, the next digit is used, too
MAX_ROWS = 2  # more would take many blocks and large lists
PAGE_SIZE = 64  # of the pages that have the groups
MIN_GROUP_KEYS, MAX_GROUP_KEYS = 8, 32
SHARED_BYTES = 8 * ENTRIES + 4 * 2048 + 4 * MAX_TILES + 1024  # at least `Shared` of the source


@dataclass(frozen=True, slots=True)
class GroupMaxima:
    """The best score of every group of keys, for each row.

    A group has 8 or 16 neighbouring keys of a page, or 16 at the same place in each of several neighbouring pages.
    """

    keys: Tensor  # [rows, num_groups] int32: scores mapped by `order_of` (CUDA C); 0: no score
    group_keys: int  # a power of two
    slots: Tensor  # [rows, SLOTS] int64: set to 0 with the scores, used by one choice

    @classmethod
    def make(cls, block_table: Tensor, k: int) -> "GroupMaxima | None":
        """Allocate for scores of these pages [rows, max_pages]; None if other ways to choose suit them better.

        A row has 4096 to 8192 groups, and at least 2 k: then a floor (threshold) that k of them reach is not far below
        the k-th best score.
        """
        rows, max_pages = block_table.shape
        group_keys = MIN_GROUP_KEYS
        while max_pages * PAGE_SIZE >= 2 * MIN_GROUPS * group_keys and group_keys < MAX_GROUP_KEYS:
            group_keys *= 2
        span = max(PAGE_SIZE, 4 * group_keys)  # keys of the pages that share groups
        num_groups = -(-max_pages * PAGE_SIZE // span) * span // group_keys
        if not 0 < rows <= MAX_ROWS or not max(2 * k, MIN_GROUPS) <= num_groups <= MAX_GROUPS:
            return None
        keys = torch.empty(rows, num_groups, dtype=torch.int32, device=block_table.device)
        return cls(keys, group_keys, torch.empty(rows, SLOTS, dtype=torch.int64, device=block_table.device))


def select_from_lists(
    scores: Tensor,  # [rows, max_pages * 64] float32
    group_maxima: GroupMaxima,
    legal_len: Tensor,  # [rows] int32
    pages: Tensor | None,  # [rows, max_pages] int32
    out: Tensor,  # [rows, k] int32, contiguous, written
    next_rows: tuple[Tensor, ...] = (),  # up to two arrays [num_rows, width] that are read next, at the chosen keys
) -> None:
    """Enqueue the choice on torch's current stream. Definition: `select.top_k` with order="position" and pages of 64.

    Rows of next_rows at keys that may be chosen are prefetched, to be in the L2 cache when the choice ends.
    """
    rows, length = scores.shape
    num_tiles = -(-length // (4 * THREADS))
    listed = torch.empty(rows, num_tiles, 4 * THREADS, dtype=torch.int64, device=scores.device)
    defines = {
        "THREADS": THREADS,
        "SLOTS": SLOTS,
        "ENTRIES": ENTRIES,
        "MAX_TILES": MAX_TILES,
        "MAX_GROUPS": MAX_GROUPS,
        "MANY_GROUPS": MANY_GROUPS,
    }
    kernel = cuda_kernel(SOURCE, "select_from_lists", defines, SHARED_BYTES, early_start=True)
    kernel.launch(
        (num_tiles, rows, 1),
        THREADS,
        *(scores, scores.stride(0), length, legal_len),
        *(group_maxima.keys, group_maxima.keys.stride(0), 4 * group_maxima.group_keys),
        *(pages, 0 if pages is None else pages.stride(0), PAGE_SIZE.bit_length() - 1),
        *(group_maxima.slots, listed, out, out.shape[1]),
        *_next_row_arguments(next_rows),
    )


def _next_row_arguments(rows: tuple[Tensor, ...]) -> tuple[Tensor | int, ...]:
    """Return address, stride and length in bytes of two arrays' rows, 0 if they cannot be prefetched; their number."""
    arguments: list[Tensor | int] = []
    for array in rows:
        stride, length = (array.itemsize * n for n in (array.stride(0), array.shape[1]))
        fits = array.stride(1) == 1 and (array.data_ptr() | stride | length) % 16 == 0
        arguments += (array, stride, length) if fits else (0, 0, 0)
    return *arguments, *(0,) * (6 - len(arguments)), len(rows[0]) if rows else 0
