"""The exact k best of a few long rows, ascending, where the best of groups of scores are known: `grouped.cu`.

`paged.hopper` writes scores and groups' best together; one launch here makes a choice of them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel

SOURCE = Path(__file__).with_name("grouped.cu")
THREADS = 1024
SLOTS = 5 * THREADS  # of a row, for what its blocks list
ENTRIES = 8192  # that one block chooses among in its shared memory
MAX_TILES = 64  # of a row
MIN_GROUPS, MAX_GROUPS = 4096, 8192
MANY_GROUPS = 640  # whose best have a digit in common: then the next one is looked at
MAX_ROWS = 2  # of more the blocks would be many, and the lists large
PAGE_SIZE = 64  # of the pages that groups are of
MIN_GROUP_KEYS, MAX_GROUP_KEYS = 8, 32
SHARED_BYTES = 8 * ENTRIES + 4 * 2048 + 4 * MAX_TILES + 1024  # at least `Shared` of the source


@dataclass(frozen=True, slots=True)
class GroupBests:
    """Of each row the best score of every group.

    A group has 8 or 16 neighbouring keys of a page, or 16 at one place of each of some neighbouring pages.
    """

    keys: Tensor  # [rows, num_groups] int32: as `order_of` has them in CUDA C, 0: no score
    group_keys: int  # a power of two
    slots: Tensor  # [rows, SLOTS] int64: 0, for one choice

    @classmethod
    def make(cls, block_table: Tensor, k: int) -> "GroupBests | None":
        """For scores of these pages [rows, max_pages]; None where other ways to choose suit them better.

        A row has from 4096 to 8192 groups, at least twice as many as are chosen: then a floor that k of them reach is
        not far below the k-th best score.
        """
        rows, max_pages = block_table.shape
        group_keys = MIN_GROUP_KEYS
        while max_pages * PAGE_SIZE >= 2 * MIN_GROUPS * group_keys and group_keys < MAX_GROUP_KEYS:
            group_keys *= 2
        span = max(PAGE_SIZE, 4 * group_keys)  # of the pages that have groups in common
        num_groups = -(-max_pages * PAGE_SIZE // span) * span // group_keys
        if not 0 < rows <= MAX_ROWS or not max(2 * k, MIN_GROUPS) <= num_groups <= MAX_GROUPS:
            return None
        keys = torch.empty(rows, num_groups, dtype=torch.int32, device=block_table.device)
        return cls(keys, group_keys, torch.empty(rows, SLOTS, dtype=torch.int64, device=block_table.device))


def choose_listed(
    scores: Tensor,  # [rows, max_pages * 64] float32
    bests: GroupBests,
    legal_len: Tensor,  # [rows] int32
    pages: Tensor | None,  # [rows, max_pages] int32
    out: Tensor,  # [rows, k] int32, contiguous, written
    next_rows: tuple[Tensor, ...] = (),  # up to two, [num_rows, width]: read next, where the keys that are chosen lie
) -> None:
    """Enqueue on torch's current stream. Definition: `select.top_k` with order="position" and pages of 64.

    Of next_rows, those of keys that may be chosen are asked for, so that they are in the L2 cache when the choice ends.
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
    kernel = cuda_kernel(SOURCE, "choose_listed", defines, SHARED_BYTES, early_start=True)
    kernel.launch(
        (num_tiles, rows, 1),
        THREADS,
        scores,
        scores.stride(0),
        length,
        legal_len,
        bests.keys,
        bests.keys.stride(0),
        4 * bests.group_keys,
        pages,
        0 if pages is None else pages.stride(0),
        PAGE_SIZE.bit_length() - 1,
        bests.slots,
        listed,
        out,
        out.shape[1],
        *_asked_for(next_rows),
    )


def _asked_for(rows: tuple[Tensor, ...]) -> tuple[Tensor | int, ...]:
    """Address, stride and length in bytes of two arrays' rows, 0 where the device cannot ask for them; their number."""
    arguments: list[Tensor | int] = []
    for array in rows:
        stride, length = (array.itemsize * n for n in (array.stride(0), array.shape[1]))
        fits = array.stride(1) == 1 and (array.data_ptr() | stride | length) % 16 == 0
        arguments += (array, stride, length) if fits else (0, 0, 0)
    return *arguments, *(0,) * (6 - len(arguments)), len(rows[0]) if rows else 0
