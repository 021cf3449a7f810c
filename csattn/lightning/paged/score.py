"""Indexer scores of keys in pages: each query has its own list of pages.

The pages are a sequence's in a paged cache (decoding with DeepSeek-V3.2's indexer), or the blocks that a coarser filter
has chosen (HISA).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.indexer import OPERAND_DTYPES, Operands
from csattn.lightning.operands.quantise import take
from csattn.lightning.paged import hopper
from csattn.lightning.paged.cache import page_views, require_within
from csattn.lightning.score import cpu
from csattn.lightning.topk.grouped import GroupMaxima


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Keys in pages of equal size, a power of two. Pages may have any stride; each page is contiguous."""

    values: Tensor  # [num_pages, page_size, head_dim] of one of OPERAND_DTYPES
    scales: Tensor  # [num_pages, page_size] float32

    @classmethod
    def of_cache(cls, cache: Tensor) -> "KeyPages":
        """The pages of a key cache (`cache`): [num_pages, 64, 1, 132] uint8 or int8."""
        return cls(*page_views(cache))

    @classmethod
    def of_keys(cls, operands: Operands, page_size: int) -> "KeyPages":
        """Cut contiguous keys into pages: page p has keys from p * page_size. Copies only to fill the last page."""
        require_at_least("page_size", page_size, 1)
        operands.check()
        num_keys, head_dim = operands.k.shape
        if not num_keys:
            raise ArrayError("k holds no keys; wanted at least one")
        values, scales = operands.k, operands.key_scales
        if missing := -num_keys % page_size:
            values = torch.cat((values, values.new_zeros(missing, head_dim)))
            scales = torch.cat((scales, scales.new_zeros(missing)))
        return cls(values.view(-1, page_size, head_dim), scales.view(-1, page_size))

    @property
    def page_size(self) -> int:
        return int(self.values.shape[1])

    def check(self) -> None:
        """Raise ArrayError unless values and scales are as described."""
        values, scales = self.values, self.scales
        if values.dim() != 3 or not len(values) or values.dtype not in OPERAND_DTYPES or not _is_contiguous(values[:1]):
            raise ArrayError(
                f"values of keys are {values.dtype} of shape {list(values.shape)} and strides {list(values.stride())}; "
                f"wanted [num_pages, page_size, head_dim], at least one page, each contiguous, of {OPERAND_DTYPES}"
            )
        if scales.dtype != torch.float32 or scales.shape != values.shape[:2] or not _is_contiguous(scales[:1]):
            raise ArrayError(
                f"scales of keys are {scales.dtype} of shape {list(scales.shape)} and strides "
                f"{list(scales.stride())}; wanted float32 {list(values.shape[:2])}, each page contiguous"
            )
        if scales.device != values.device:
            raise ArrayError(f"scales of keys are on {scales.device}, values on {values.device}; move them there first")
        if self.page_size & (self.page_size - 1) or not self.page_size:
            raise ArrayError(f"pages hold {self.page_size} keys; wanted a power of two")


def score_pages(
    q: Tensor,  # [num_queries, num_heads, head_dim], like the keys' values
    weights: Tensor,  # [num_queries, num_heads] float32
    keys: KeyPages,
    pages: Tensor,  # [num_queries, max_pages] int32; rows may have any stride, also 0
    kv_lens: Tensor,  # [num_queries] int32: how many keys each query has; they fill its pages in order
    *,
    longer_than: int = 0,  # queries with no more keys than this are not scored
    out: Tensor | None = None,  # [num_queries, max_pages * page_size] float32
    group_maxima: GroupMaxima | None = None,  # each group's best score, written; only where `hopper.supports` the keys
) -> Tensor:
    """Return scores [num_queries, max_pages * page_size] float32, in the order of each query's pages.

    Definition: `score.reference.score_keys`; on the CPU with the bits of `score.cpu`. Only scores of a query's keys
    are written; a page that does not exist gives -inf. Entries of `pages` past a query's keys are ignored.
    """
    keys.check()
    require_array("q", q, ("num_queries", "num_heads", keys.values.shape[2]), keys.values.dtype, like=keys.values)
    require_array("weights", weights, tuple(q.shape[:2]), torch.float32, like=q)
    require_array("pages", pages, (len(q), "max_pages"), torch.int32, like=q, any_row_stride=True)
    require_array("kv_lens", kv_lens, (len(q),), torch.int32, like=q)
    max_len = pages.shape[1] * keys.page_size
    if out is None:
        out = torch.empty(len(q), max_len, dtype=torch.float32, device=q.device)
    require_array("out", out, (len(q), max_len), torch.float32, like=q)
    if hopper.supports(q, keys.values, keys.scales, pages):
        hopper.score_on_hopper(q, weights, keys.values, pages, kv_lens, longer_than, out, group_maxima)
        return out
    if q.device.type == "cuda":
        from csattn.lightning.paged.triton_kernels import score_on_device  # needs Triton: GPU only

        score_on_device(q, weights, keys.values, keys.scales, pages, kv_lens, longer_than, out)
        return out
    for query, kv_len in enumerate(kv_lens.tolist()):
        kv_len = min(kv_len, max_len)
        if kv_len > longer_than:
            own = pages[query, : -(-kv_len // keys.page_size)]
            out[query, :kv_len] = _score_one(q[query], weights[query], keys, own)[:kv_len]
    return out


def require_pages(name: str, pages: Tensor, kv_lens: Tensor, keys: KeyPages) -> None:
    """Raise ArrayError if a page with a query's keys does not exist. Not checked on a GPU: it would synchronize."""
    if not pages.is_cuda:
        hold_keys = torch.arange(pages.shape[1]) * keys.page_size < kv_lens[:, None]
        require_within(name, pages[hold_keys], 0, len(keys.values))


def _score_one(q: Tensor, weights: Tensor, keys: KeyPages, pages: Tensor) -> Tensor:
    """Return all scores of one query's pages, on the CPU."""
    exists = (pages >= 0) & (pages < len(keys.values))
    at = torch.where(exists, pages, 0).long()
    operands = Operands(q[None], take(keys.values, at).flatten(0, 1), weights[None], keys.scales[at].flatten())
    scores = torch.empty(1, len(operands.k), dtype=torch.float32)
    cpu.score_tile(operands, range(len(operands.k)), torch.tensor([len(operands.k)], dtype=torch.int32), scores)
    return torch.where(exists.repeat_interleave(keys.page_size), scores[0], -torch.inf)


def _is_contiguous(page: Tensor) -> bool:
    return page[0].is_contiguous() if len(page) else True
