"""The order in which scored keys are chosen, the same in every path: score descending, then index ascending.

-0 equals +0. NaN ranks after -inf, all NaNs equal. Whether a key may be chosen depends on its index alone, never on
its score: a legal key of score -inf or NaN is chosen where nothing better is left.
"""

import torch
from torch import Tensor

SENTINEL = -1  # an index that stands for no key
_INDEX_BITS = 0xFFFF_FFFF
_LOWEST = -(2**31)


def order_keys(
    scores: Tensor,  # [..., n] float32
    indices: Tensor,  # [..., n] or [n], of keys, >= 0
) -> Tensor:
    """Return integers in the order of choice: [..., n] int64, all different, the larger the better.

    The upper half is `orderable(scores)`; the lower half falls as the index rises.
    """
    return (orderable(scores).long() << 32) | (_INDEX_BITS - indices.long())


def orderable(scores: Tensor) -> Tensor:
    """Return integers that compare as the scores do: float32 -> int32."""
    bits = scores.contiguous().view(torch.int32)
    bits = torch.where(scores == 0, 0, bits)
    bits = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    return torch.where(scores.isnan(), _LOWEST, bits).to(torch.int32)


def indices_of(keys: Tensor) -> Tensor:
    """The indices that `order_keys` was given: int64 -> int32."""
    return (_INDEX_BITS - (keys & _INDEX_BITS)).to(torch.int32)


def top_k_reference(
    scores: Tensor,  # [rows, length] float32
    k: int,
    legal_len: Tensor,  # [rows] int32: the keys 0..legal_len-1 of a row may be chosen, at most `length`
) -> Tensor:
    """The definition of every selection: indices [rows, k] int32 of the best legal keys, best first, -1 padded."""
    rows, length = scores.shape
    indices = torch.arange(length, device=scores.device)
    keys = order_keys(scores, indices)
    legal = indices < legal_len[:, None]
    best = torch.where(legal, keys, torch.iinfo(torch.int64).min).sort(dim=1, descending=True).values[:, :k]
    chosen = torch.full((rows, k), SENTINEL, dtype=torch.int32, device=scores.device)
    chosen[:, : best.shape[1]] = indices_of(best)
    return torch.where(torch.arange(k, device=scores.device) < legal_len[:, None], chosen, SENTINEL)
