"""Moments in the layout that attention on a device reads: like KV rows, to be multiplied with a step's queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.errors import ConfigError
from csattn.rest.moments import Moments


@dataclass(frozen=True, slots=True)
class DeviceMoments:
    """The moments of one layer of every loaded context. Contents may change between steps; the tensors never do."""

    table: Tensor  # [num_contexts, *moments_shape(...)], as `moment_table` makes it, in the dtype of KV rows
    num_rows: Tensor  # [num_contexts] int32: the rows that may be chosen


def moments_shape(num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """The shape of one context's `moment_table` in a layer."""
    return num_kv_heads, 2 + head_dim, 2, head_dim


def moment_table(moments: Moments, softmax_scale: float, dtype: torch.dtype) -> Tensor:
    """Lay the moments out like KV rows: [num_kv_heads, 2 + head_dim, 2, head_dim].

    Row 0 has the mean key and the mean value, rounded to dtype, and row 1 their rounding errors. Row 2 + i has, for
    dimension i, the covariances of the keys with that dimension of the key, and with that of the value.

    softmax_scale is included in everything that a query is multiplied with. Covariances in bfloat16 put the log-sum-exp
    off by 0.0015 on average, and the estimate by 0.0006 of its length (SmolLM2). Means without their rounding errors
    would put the log-sum-exp off by 0.017.
    Raises ConfigError for moments that the dtype cannot hold: attention would be NaN.
    """
    means = torch.stack([softmax_scale * torch.from_numpy(moments.key_mean), torch.from_numpy(moments.value_mean)], 1)
    key_cov, cross_cov = torch.from_numpy(moments.key_cov), torch.from_numpy(moments.cross_cov)
    covs = torch.stack([softmax_scale**2 * key_cov, softmax_scale * cross_cov.transpose(1, 2)], dim=2)
    rounded = means.to(dtype)
    left = (means - rounded.float()).to(dtype)
    table = torch.cat([rounded[:, None], left[:, None], covs.to(dtype)], dim=1)
    if not table.isfinite().all():
        raise ConfigError(
            f"the moments of this context's keys and values are too large for {dtype}; choose bfloat16, or rest sketch "
            "or none"
        )
    return table
