"""HISA (arXiv:2603.28458): a learned indexer that scores blocks of keys first, then the keys of the best blocks.

Its choice has the form of DSA's, and is the same wherever the best blocks (candidates) cover all keys of a query.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from csattn.errors import ConfigError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.hisa.choice import BlockLists, choose_candidates
from csattn.lightning.hisa.pooling import PAGE_SIZE, pool_keys
from csattn.lightning.hisa.reference import best_blocks_reference, candidate_pages_reference, num_blocks_reference
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.paged.score import KeyPages, require_pages, score_pages
from csattn.lightning.topk.select import Order, top_k

_FEW_BLOCKS, _FEW_KEYS = 64, 32768  # the paper's candidates, and how many keys they are enough for


@dataclass(frozen=True, slots=True, kw_only=True)
class HisaConfig:
    """Which blocks are candidates. The final paper always takes the first and the last, its first version 1 and 2."""

    block_size: int = 128
    num_blocks: int = _FEW_BLOCKS  # candidates per query
    first_blocks: int = 1  # always among them
    last_blocks: int = 1  # always among them: the last that a query sees, its own included

    def __post_init__(self) -> None:
        require_at_least("block_size", self.block_size, 1)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; wanted a power of two")
        require_at_least("num_blocks", self.num_blocks, 1)
        require_at_least("first_blocks", self.first_blocks, 0)
        require_at_least("last_blocks", self.last_blocks, 0)
        if self.first_blocks + self.last_blocks > self.num_blocks:
            raise ConfigError(
                f"{self.first_blocks} first and {self.last_blocks} last blocks are more than the {self.num_blocks} "
                f"candidates; raise num_blocks"
            )

    @classmethod
    def for_prefix(cls, num_keys: int) -> "HisaConfig":
        """Return a config for queries of about num_keys keys: 64 blocks up to 32K, growing as the square root beyond.

        The more blocks there are, the more of them look good by chance: on the structured keys of `bench.lightning`, an
        overlap with DSA of 0.994 takes 52, 80 and 113 blocks at 32K, 64K and 128K.
        """
        growth = max(1.0, num_keys / _FEW_KEYS) ** 0.5
        return cls(num_blocks=ceil(_FEW_BLOCKS * growth / 8) * 8)

    @property
    def pool_len(self) -> int:
        """How many keys the candidates of a query have."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class BlockedKeys:
    """The keys that queries see, and their block keys. A block is one page of keys, or several."""

    keys: KeyPages
    pages: Tensor  # [num_queries, max_pages] int32, of each query's keys
    block_keys: KeyPages
    block_pages: Tensor  # [num_queries, max_block_pages] int32, of each query's block keys
    in_order: bool = False  # there is one sequence, whose pages are all of `keys`, in order

    @classmethod
    def of_operands(cls, operands: Operands, block_size: int) -> "BlockedKeys":
        """Return blocks of one sequence with contiguous keys; all queries see the same pages."""
        num_queries, device = len(operands.q), operands.q.device
        keys = KeyPages.of_keys(operands, block_size)
        values, scales = pool_keys(operands.k, operands.key_scales, block_size)
        weights = operands.weights
        pooled = KeyPages.of_keys(Operands(operands.q, values.to(operands.q.dtype), weights, scales), PAGE_SIZE)
        pages = [torch.arange(len(x.values), dtype=torch.int32, device=device) for x in (keys, pooled)]
        return cls(keys, pages[0].expand(num_queries, -1), pooled, pages[1].expand(num_queries, -1), in_order=True)


def hisa_top_k(
    q: Tensor,  # [num_queries, num_heads, head_dim], like the keys
    weights: Tensor,  # [num_queries, num_heads] float32
    blocked: BlockedKeys,
    kv_lens: Tensor,  # [num_queries] int32: how many keys each query sees, the first ones of its pages
    k: int,
    config: HisaConfig,
    *,
    order: Order = "score",
    physical: bool = False,  # whether indices are page * page_size + row instead of positions in the sequence
    out: Tensor | None = None,  # [num_queries, k] int32
) -> Tensor:
    """Return the best keys of the best blocks: indices [num_queries, k] int32, -1 padded, ordered as by `top_k`.

    A page with keys that a query sees raises ArrayError on the CPU if it does not exist; on a GPU it is not checked,
    which would synchronize.
    """
    require_at_least("k", k, 1, config.pool_len)
    require_array("pages", blocked.pages, (len(q), "max_pages"), torch.int32, like=q, any_row_stride=True)
    if blocked.in_order and blocked.keys.page_size != config.block_size:
        raise ConfigError(
            f"block_size is {config.block_size}, and the block keys are of {blocked.keys.page_size} keys; make them "
            f"by BlockedKeys.of_operands(operands, {config.block_size})"
        )
    all_chosen = k if order == "position" else 0  # queries with no more keys than this are not scored
    lists = None
    operands = _for_hopper(q, weights, blocked.keys, config.block_size) if blocked.in_order else None
    if operands is not None:
        lists = BlockLists.empty(-(-len(operands.k) // config.block_size), len(q), q.device)
    blocks, num_keys = choose_blocks(q, weights, blocked, kv_lens, config, lists=lists, longer_than=all_chosen)
    require_pages("pages", blocked.pages, kv_lens, blocked.keys)
    where, page_size = blocks, config.block_size
    if operands is not None and lists is not None:
        from csattn.lightning.hisa.score import score_candidates  # needs Triton: GPU only

        scores = score_candidates(operands, config.block_size, config.num_blocks, lists)
    else:
        pages = candidate_pages(blocks, blocked.pages, kv_lens, blocked.keys.page_size, config.block_size)
        scores = score_pages(q, weights, blocked.keys, pages, num_keys, longer_than=all_chosen)
        if physical:
            where, page_size = pages, blocked.keys.page_size
    return top_k(scores, k, num_keys, order=order, pages=where, page_size=page_size, out=out)


def choose_blocks(
    q: Tensor,
    weights: Tensor,
    blocked: BlockedKeys,
    kv_lens: Tensor,
    config: HisaConfig,
    *,
    lists: BlockLists | None = None,  # on a GPU: written; empty before
    longer_than: int = 0,  # queries with no more keys than this are in no list
) -> tuple[Tensor, Tensor]:
    """Return the candidates of each query, and how many keys it sees in them, as `best_blocks` does.

    The other arguments are those of `hisa_top_k`. Only the last block of a sequence may be partial, and it comes last.
    """
    require_array("kv_lens", kv_lens, (len(q),), torch.int32, like=q)
    operands = _for_hopper(q, weights, blocked.block_keys, PAGE_SIZE) if blocked.in_order else None
    if operands is not None:
        from csattn.lightning.hisa.score import score_blocks  # needs Triton: GPU only

        scores = score_blocks(operands, kv_lens, config.block_size)
        return best_blocks(scores, kv_lens, config, lists=lists, longer_than=longer_than)
    if kv_lens.is_cuda:
        from csattn.lightning.hisa.triton_kernels import max_blocks_on_device  # one launch instead of two

        num_blocks = torch.empty_like(kv_lens)
        max_blocks_on_device(kv_lens, config.block_size, 1, num_blocks)
    else:
        num_blocks = num_blocks_reference(kv_lens, config.block_size)
    pages = blocked.block_pages
    scores = score_pages(q, weights, blocked.block_keys, pages, num_blocks, longer_than=config.num_blocks)
    return best_blocks(scores, kv_lens, config, lists=lists, longer_than=longer_than)


def best_blocks(
    scores: Tensor,  # [num_queries, max_blocks] float32, may be overwritten; unseen blocks' scores are ignored
    kv_lens: Tensor,  # [num_queries] int32
    config: HisaConfig,
    *,
    lists: BlockLists | None = None,  # on a GPU: written; empty before
    longer_than: int = 0,  # queries with no more keys than this are in no list
) -> tuple[Tensor, Tensor]:
    """Return the first, the last and the best other blocks: [num_queries, num_blocks] int32, ascending, -1 padded.

    Return also how many keys each query sees in them: [num_queries] int32.
    """
    ends = config.first_blocks, config.last_blocks
    if scores.device.type == "cuda":
        chosen, num_keys = kv_lens.new_empty(len(scores), config.num_blocks), torch.empty_like(kv_lens)
        seen = scores, kv_lens, config.block_size, ends
        choose_candidates(*seen, chosen, num_keys, lists=lists, longer_than=longer_than)
        return chosen, num_keys
    return best_blocks_reference(scores, kv_lens, config.block_size, ends, config.num_blocks)


def candidate_pages(
    candidates: Tensor,  # [num_queries, num_blocks] int32, ascending, -1 padded
    pages: Tensor,  # [num_queries, max_pages] int32
    kv_lens: Tensor,  # [num_queries] int32
    page_size: int,
    block_size: int,
) -> Tensor:
    """Return the candidates' pages: [num_queries, num_blocks * pages of a block] int32, -1 where there is none."""
    if block_size % page_size:
        raise ConfigError(f"blocks of {block_size} keys do not divide into pages of {page_size}")
    if candidates.device.type == "cuda":
        from csattn.lightning.hisa.triton_kernels import pages_on_device

        own = candidates.new_empty(len(candidates), candidates.shape[1] * (block_size // page_size))
        pages_on_device(candidates, pages, kv_lens, block_size, own)
        return own
    return candidate_pages_reference(candidates, pages, kv_lens, page_size, block_size)


def _for_hopper(q: Tensor, weights: Tensor, keys: KeyPages, block_size: int) -> Operands | None:
    """Return the operands of all queries and all keys, the padding of the last page included.

    None where Hopper's kernel does not support them.
    """
    operands = Operands(q, keys.values.flatten(0, 1), weights, keys.scales.flatten())
    operands.check()
    if not q.is_cuda or not len(q) or not len(operands.k):
        return None
    from csattn.lightning.hisa.score import supports  # needs Triton: GPU only

    return operands if supports(operands, block_size) else None
