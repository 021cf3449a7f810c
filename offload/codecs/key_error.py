"""Whether coding leaves keys what tells them apart, by a few rows of each head.

A bias of the projection to keys may be hundreds of times what a token adds to them, and RoPE turns it with the
position. A format's steps are then as large as that: what is left of the tokens is noise.
"""

import torch
from torch import Tensor

from offload.codecs.codec import KvCodec
from offload.codecs.formats import Format, KvFormat

_RUN_LEN, _NUM_RUNS = 16, 8  # rows of a head that are looked at: they lie together, at places through the context


def key_error(kv: Tensor, form: Format) -> float:
    """How far coding moves keys, over how far apart tokens put them: rms each, of the head where that is worst.

    kv: [num_kv_heads, context_len, 2, head_dim] of any float dtype. At 1 nothing is left of the tokens. The worse of
    two sums over head_dim: all alike, and each by its mean square, for queries are large where keys are. 0 for fewer
    than 32 rows, which tell too little. Raises CodecError for what the format cannot keep.
    """
    context_len, head_dim = kv.shape[1], kv.shape[-1]
    if context_len < 2 * _RUN_LEN:
        return 0.0
    starts = torch.linspace(_RUN_LEN, context_len - _RUN_LEN, _NUM_RUNS).long()  # the first rows are unlike all others
    runs = kv[:, starts[:, None] + torch.arange(_RUN_LEN)].float()  # [num_kv_heads, num_runs, run_len, 2, head_dim]
    codec = KvCodec(KvFormat(form, form), head_dim)
    keys = runs[..., :1, :].expand_as(runs)  # values may be more than the format can keep, and have one of their own
    moved = torch.from_numpy(codec.decode(codec.encode(keys.contiguous().numpy()))) - keys
    moved, keys = moved[..., 0, :], keys[..., 0, :]
    moved = moved - moved.mean(2, keepdim=True)  # what moves all alike changes no weight of attention
    error, apart, large = (_mean_square(x) for x in (moved, _beyond_neighbours(keys), keys))
    shares = [(w * error).sum(-1) / (w * apart).sum(-1) for w in (1.0, large)]
    return float(torch.stack(shares).nan_to_num(0.0, posinf=0.0).sqrt().max())  # 0 where tokens put nothing apart


def _beyond_neighbours(keys: Tensor) -> Tensor:
    """What is left of each number when the mean of those in the rows beside has told as much of it as it can.

    A vector that turns evenly is, but for a factor, the mean of those beside it.
    """
    key, beside = keys[:, :, 1:-1], (keys[:, :, :-2] + keys[:, :, 2:]) / 2
    key, beside = (x - x.mean((1, 2), keepdim=True) for x in (key, beside))
    factor = (key * beside).sum((1, 2), keepdim=True) / (beside * beside).sum((1, 2), keepdim=True)
    return key - factor.nan_to_num(0.0) * beside


def _mean_square(x: Tensor) -> Tensor:
    """[num_kv_heads, num_runs, any, head_dim] -> [num_kv_heads, head_dim]."""
    return x.square().mean((1, 2))
