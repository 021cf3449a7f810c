"""HISA's choice of blocks by definition, on the CPU."""

import torch
from torch import Tensor

from csattn.lightning.topk.reference import SENTINEL
from csattn.lightning.topk.select import top_k


def best_blocks_reference(
    scores: Tensor,  # [num_queries, max_blocks] float32, overwritten
    kv_lens: Tensor,  # [num_queries] int32
    block_size: int,
    ends: tuple[int, int],  # how many of the first and of the last blocks that a query sees are always chosen
    num_chosen: int,
) -> tuple[Tensor, Tensor]:
    """Return the first, the last and the best other blocks: [num_queries, num_chosen] int32, ascending, -1 padded.

    Return also how many keys each query sees in them: [num_queries] int32.
    """
    num_blocks = num_blocks_reference(kv_lens, block_size)
    block = torch.arange(scores.shape[1])
    forced = (block < ends[0]) | (block >= num_blocks[:, None] - ends[1])
    scores.clamp_(max=torch.finfo(torch.float32).max).masked_fill_(forced & (block < num_blocks[:, None]), torch.inf)
    chosen = top_k(scores, num_chosen, num_blocks, order="position")
    missing = ((chosen + 1) * block_size - kv_lens[:, None]).clamp(min=0)
    return chosen, torch.where(chosen < 0, 0, block_size - missing).sum(1).to(torch.int32)


def candidate_pages_reference(
    candidates: Tensor, pages: Tensor, kv_lens: Tensor, page_size: int, block_size: int
) -> Tensor:
    """As `select.candidate_pages`."""
    each = block_size // page_size
    numbers = (candidates[..., None] * each + torch.arange(each, dtype=torch.int32)).flatten(1)
    there = (numbers >= 0) & (numbers * page_size < kv_lens[:, None]) & (numbers < pages.shape[1])
    if not pages.shape[1]:
        pages = pages.new_zeros(len(pages), 1)  # `gather` reads masked places, too
    return torch.where(there, pages.gather(1, torch.where(there, numbers, 0).long()), SENTINEL)


def num_blocks_reference(kv_lens: Tensor, block_size: int) -> Tensor:
    """Return how many blocks each query sees: [num_queries] int32."""
    return (kv_lens + (block_size - 1)) // block_size
