"""Means and covariances of a context's keys and values: all that an estimate of unread rows reads."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one layer's rows that may be chosen. All requests share them, and each token reads all of them."""

    # [num_kv_heads, 2 + 2 * head_dim, head_dim]: the mean key, the mean value, the covariance of the keys, and the
    # covariance of keys (rows) with values (columns)
    table: NDArray[np.float32]

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    @property
    def key_mean(self) -> NDArray[np.float32]:
        return self.table[:, 0]

    @property
    def value_mean(self) -> NDArray[np.float32]:
        return self.table[:, 1]

    @property
    def key_cov(self) -> NDArray[np.float32]:
        return self.table[:, 2 : 2 + self.table.shape[2]]

    @property
    def cross_cov(self) -> NDArray[np.float32]:
        return self.table[:, 2 + self.table.shape[2] :]


def moments_of(pieces: Iterable[Tensor]) -> Moments:
    """Compute the moments of all rows of the pieces [num_kv_heads, num_rows, 2, head_dim], together at least one row.

    All pieces are on one device, which may be any. Each is used up before the next is taken from the iterable. Products
    are computed in float32, relative to the mean of the first rows, and summed in float64 block by block, so that no
    piece is copied as a whole.
    """
    origin, sums, products, num_rows = torch.empty(0), torch.empty(0), torch.empty(0), 0
    for block in (block for piece in pieces for block in torch.split(piece, _BLOCK_ROWS, dim=1)):
        rows = block.float().flatten(2)  # [num_kv_heads, num_rows, key and value]
        if num_rows == 0:
            origin = rows.mean(1, keepdim=True)
            sums, products = torch.zeros(()).double(), torch.zeros(()).double()
        rows = rows - origin
        keys = rows[..., : block.shape[3]]
        sums = sums + rows.sum(1).double()
        products = products + (keys.transpose(1, 2) @ rows).double()
        num_rows += rows.shape[1]
    assert num_rows > 0, "moments of no rows"
    mean = sums / num_rows
    head_dim = mean.shape[1] // 2
    cov = products / num_rows - mean[:, :head_dim, None] * mean[:, None]
    mean = mean + origin[:, 0].double()
    table = torch.cat([mean.view(-1, 2, head_dim), cov[..., :head_dim], cov[..., head_dim:]], dim=1)
    return Moments(table.float().cpu().numpy())
