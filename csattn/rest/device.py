"""Moments as attention on a device reads them: laid out like KV rows, for products with a step's queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.rest.moments import Moments


@dataclass(frozen=True, slots=True)
class DeviceMoments:
    """Of one layer of each loaded context. Between steps the contents may change, never the tensors."""

    table: Tensor  # [num_contexts, *moments_shape(...)], as `moment_table` makes it, in the dtype of KV rows
    num_rows: Tensor  # [num_contexts] int32: the rows that could be selected


def moments_shape(num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Of a layer's table of one context."""
    return num_kv_heads, 2 + head_dim, 2, head_dim


def moment_table(moments: Moments, softmax_scale: float, dtype: torch.dtype) -> Tensor:
    """[num_kv_heads, 2 + head_dim, 2, head_dim]: the mean key and value, rounded, then what that has left of them; then
    for each dimension the keys' covariances with that of the key, and with that of the value.

    In units of logits wherever a query is multiplied with it. In bfloat16 the covariances put the log-sum-exp off by
    0.0015 on average, the estimate by 0.0006 of its length (SmolLM2); rounded means would put the former off by 0.017.
    """
    means = torch.stack([softmax_scale * torch.from_numpy(moments.key_mean), torch.from_numpy(moments.value_mean)], 1)
    key_cov, cross_cov = torch.from_numpy(moments.key_cov), torch.from_numpy(moments.cross_cov)
    covs = torch.stack([softmax_scale**2 * key_cov, softmax_scale * cross_cov.transpose(1, 2)], dim=2)
    rounded = means.to(dtype)
    left = (means - rounded.float()).to(dtype)
    return torch.cat([rounded[:, None], left[:, None], covs.to(dtype)], dim=1)
