"""Estimate, from a few rows of each head, whether coded keys can still be told apart.

The bias of the key projection may be hundreds of times as large as what a token adds to a key, and RoPE rotates it with
the position. The format's step then scales with the bias, and what tokens add is lost in rounding noise.
"""

import torch
from torch import Tensor

from offload.codecs.codec import KvCodec
from offload.codecs.formats import Format, KvFormat

_RUN_LEN, _NUM_RUNS = 16, 8  # sampled rows of a head: runs of consecutive rows, spread over the context


def key_error(kv: Tensor, form: Format) -> float:
    """Return the rms error of coded keys over the rms of what tokens add to keys, for the head where it is largest.

    kv: [num_kv_heads, context_len, 2, head_dim] of any float dtype. At 1, nothing of the tokens is left. The mean over
    head_dim is taken twice, unweighted and weighted by the keys' mean square, as queries are large where keys are; the
    larger result counts. Returns 0 for fewer than 32 rows, which are too few. Raises CodecError for keys that the
    format cannot keep.
    """
    context_len, head_dim = kv.shape[1], kv.shape[-1]
    if context_len < 2 * _RUN_LEN:
        return 0.0
    first, last = _RUN_LEN, context_len - _RUN_LEN  # the first rows are unlike all others
    starts = torch.linspace(first, last, _NUM_RUNS, dtype=torch.float64).long()  # float32 rounds above 2^24
    runs = kv[:, starts[:, None] + torch.arange(_RUN_LEN)].float()  # [num_kv_heads, num_runs, run_len, 2, head_dim]
    codec = KvCodec(KvFormat(form, form), head_dim)
    keys = runs[..., :1, :].expand_as(runs)  # not the values: they have a format of their own, and may not fit this one
    moved = torch.from_numpy(codec.decode(codec.encode(keys.contiguous().numpy()))) - keys
    moved, keys = moved[..., 0, :], keys[..., 0, :]
    moved = moved - moved.mean(2, keepdim=True)  # an error that all keys share changes no attention weight
    error, distinct, large = (_mean_square(x) for x in (moved, _minus_neighbours(keys), keys))
    shares = [(w * error).sum(-1) / (w * distinct).sum(-1) for w in (1.0, large)]
    return float(torch.stack(shares).nan_to_num(0.0, posinf=0.0).sqrt().max())  # 0 if tokens add nothing to keys


def _minus_neighbours(keys: Tensor) -> Tensor:
    """Return the residual of a linear regression of each row on the mean of the two rows next to it, by channel.

    It removes a vector that RoPE rotates at a constant rate: such a vector is proportional to its neighbours' mean.
    """
    key, interpolated = keys[:, :, 1:-1], (keys[:, :, :-2] + keys[:, :, 2:]) / 2
    key, interpolated = (x - x.mean((1, 2), keepdim=True) for x in (key, interpolated))
    factor = (key * interpolated).sum((1, 2), keepdim=True) / (interpolated * interpolated).sum((1, 2), keepdim=True)
    return key - factor.nan_to_num(0.0) * interpolated


def _mean_square(x: Tensor) -> Tensor:
    """[num_kv_heads, num_runs, any, head_dim] -> [num_kv_heads, head_dim]."""
    return x.square().mean((1, 2))
