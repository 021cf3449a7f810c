"""The exact top-k of every row of scores, in the order of `reference`, on any device.

On a GPU it is one launch (`device`). Elsewhere, and for a k above MAX_K, torch selects among 64-bit
keys: all keys differ, so the result is unique there, too.
"""

from typing import Literal

import torch
from torch import Tensor

from csattn.errors import ArrayError, ConfigError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.topk.device import MAX_K, select_on_device
from csattn.lightning.topk.grouped import PAGE_SIZE, GroupMaxima, select_from_lists
from csattn.lightning.topk.reference import SENTINEL, indices_of, order_keys

KEYS_AT_ONCE = 1 << 24  # of 8 bytes each, where torch selects

Order = Literal["score", "position"]


def top_k(
    scores: Tensor,  # [rows, length] float32; rows may have any stride
    k: int,
    legal_len: Tensor | None = None,  # [rows] int32: keys 0..legal_len-1 of a row may be chosen; None: all
    *,
    order: Order = "score",
    pages: Tensor | None = None,  # [rows, num_pages] int32: where the keys of each row lie
    page_size: int = 1,
    out: Tensor | None = None,  # [rows, k] int32
    group_maxima: GroupMaxima | None = None,  # of these scores, for this call only: faster by position, in pages of 64
    next_rows: tuple[Tensor, ...] = (),  # see `grouped.select_from_lists`
) -> Tensor:
    """Return indices [rows, k] int32 of each row's k best legal scores, -1 padded. Scores past legal_len are not read.

    Best first, of equal scores the lower index (definition: `top_k_reference`); with order="position" the
    same indices in ascending order, as a gather wants them. legal_len outside 0..length counts as the nearer of those.
    With pages, an index i is written as pages[row, i // page_size] * page_size + i % page_size.
    """
    _require(scores, k, legal_len, order, out)
    _require_pages(scores, pages, page_size)
    rows, length = scores.shape
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    by_lists = order == "position" and (pages is None or page_size == PAGE_SIZE)
    if group_maxima is not None and legal_len is not None and by_lists:
        select_from_lists(scores, group_maxima, legal_len, pages, out, next_rows)
        return out
    if scores.device.type == "cuda" and k <= MAX_K:
        select_on_device(scores, legal_len, order == "position", pages, page_size, out)
        return out
    if legal_len is None:
        legal_len = torch.full((rows,), length, dtype=torch.int32, device=scores.device)
    step = max(1, KEYS_AT_ONCE // max(1, length))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        _select(scores[some], legal_len[some], order, out[some])
    if pages is not None and length:
        at = out.clamp(min=0).long()
        paged = pages.gather(1, at // page_size) * page_size + at % page_size
        out.copy_(torch.where(out >= 0, paged, SENTINEL))
    return out


def _select(scores: Tensor, legal_len: Tensor, order: Order, out: Tensor) -> None:
    """Select by torch, in all rows at once."""
    length, k = scores.shape[1], out.shape[1]
    indices = torch.arange(length, device=scores.device)
    illegal = indices >= legal_len[:, None]
    keys = order_keys(scores, indices).masked_fill_(illegal, torch.iinfo(torch.int64).min)
    chosen = indices_of(keys.topk(min(k, length), dim=1).values)
    past = torch.arange(chosen.shape[1], device=scores.device) >= legal_len[:, None]
    out.fill_(SENTINEL)
    if order == "position":
        chosen = chosen.masked_fill(past, torch.iinfo(torch.int32).max).sort(dim=1).values
    out[:, : chosen.shape[1]] = chosen.masked_fill_(past, SENTINEL)


def _require(scores: Tensor, k: int, legal_len: Tensor | None, order: str, out: Tensor | None) -> None:
    require_array("scores", scores, ("rows", "length"), torch.float32, any_row_stride=True)
    rows, length = scores.shape
    if rows > 1 and scores.stride(0) < length:
        raise ArrayError(
            f"scores of shape {[rows, length]} have strides {list(scores.stride())}; wanted rows that do not overlap: "
            f"call .contiguous() first"
        )
    require_at_least("k", k, 1)
    if order not in ("score", "position"):
        raise ConfigError(f"order is {order!r}; wanted 'score' or 'position'")
    if legal_len is not None:
        require_array("legal_len", legal_len, (rows,), torch.int32, like=scores)
    if out is not None:
        require_array("out", out, (rows, k), torch.int32, like=scores)


def _require_pages(scores: Tensor, pages: Tensor | None, page_size: int) -> None:
    if pages is None:
        return
    require_at_least("page_size", page_size, 1)
    rows, length = scores.shape
    require_array("pages", pages, (rows, "num_pages"), torch.int32, like=scores, any_row_stride=True)
    if pages.shape[1] * page_size < length:
        raise ArrayError(
            f"pages have shape {list(pages.shape)}; {rows} rows of {length} scores in pages of {page_size} need "
            f"[{rows}, {-(-length // page_size)}] or more"
        )
