"""The choice of HISA's candidate blocks on a CUDA device, in one launch: `choice.cu`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel

SOURCE = Path(__file__).with_name("choice.cu")
FEW_THREADS, MANY_THREADS = 128, 1024  # per query
MANY_BLOCKS = 4096  # above this, MANY_THREADS are used
ITEM_QUERIES = 32


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The queries that each block is a candidate of. Lists are cut into items of up to ITEM_QUERIES, in any order."""

    entries: Tensor  # [num_blocks, num_queries] int32: query * candidates of a query + the block's number among them
    counts: Tensor  # [num_blocks + 2] int32: entries of each list; then numbers of items, and of items taken
    items: Tensor  # int32: block * most items of a block + the item's number in its block

    @classmethod
    def empty(cls, num_blocks: int, num_queries: int, device: torch.device) -> "BlockLists":
        most_items = num_blocks * -(-num_queries // ITEM_QUERIES)
        sizes = (num_blocks, num_queries), (most_items,)
        entries, items = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
        return cls(entries, torch.zeros(num_blocks + 2, dtype=torch.int32, device=device), items)


def choose_candidates(
    scores: Tensor,  # [num_queries, max_blocks] float32, rows of any stride; of blocks that a query sees
    kv_lens: Tensor,  # [num_queries] int32
    block_size: int,
    ends: tuple[int, int],  # how many of the first and of the last blocks that a query sees are always chosen
    candidates: Tensor,  # [num_queries, num_blocks] int32, written
    num_keys: Tensor,  # [num_queries] int32, written: keys that a query sees in its candidates
    *,
    lists: BlockLists | None = None,  # written; empty before
    longer_than: int = 0,  # queries with no more keys than this are in no list
) -> None:
    """As `reference.best_blocks_reference`, on torch's current stream; the scores are not changed."""
    num_queries, max_blocks = scores.shape
    if not num_queries:
        return
    threads = FEW_THREADS if max_blocks <= MANY_BLOCKS else MANY_THREADS
    each = 1 << (max(1, -(-max_blocks // threads)) - 1).bit_length()
    defines = {"THREADS": threads, "EACH": each, "ITEM_QUERIES": ITEM_QUERIES}
    kernel = cuda_kernel(SOURCE, "choose_candidates", defines, early_start=True)
    kernel.launch(
        (num_queries, 1, 1),
        threads,
        *(scores, scores.stride(0), max_blocks, kv_lens, block_size, *ends),
        *(candidates, candidates.shape[1], num_keys),
        *((0, 0, 0, 0) if lists is None else (lists.entries, lists.counts, lists.items, len(lists.entries))),
        longer_than,
    )
