"""Scores on the CPU, summed in one fixed order: a score has the same bits in every tile and on every machine.

Per head, products are added up channel by channel in float32; then the heads' weighted scores, head by head.
"""

from typing import Any

import numpy as np
from numba import float32
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.jit import exact_kernel, readonly
from csattn.lightning.operands.indexer import Operands

LANES = 64  # keys that are scored at a time
_QUERIES = 16  # converted to float32 at a time


def score_tile(
    operands: Operands,
    keys: range,  # to be scored
    legal_len: Tensor,  # [num_queries] int32; a query's keys from there on are not scored
    out: Tensor,  # [num_queries, at least len(keys)] float32, written
) -> None:
    """Score some keys. Definition: `reference.score_keys`, apart from the order of summation."""
    lanes = -(-len(keys) // LANES) * LANES
    columns = np.zeros((operands.k.shape[1], lanes), dtype=np.float32)
    columns[:, : len(keys)] = operands.k[keys.start : keys.stop].detach().float().numpy().T
    scale = operands.key_scales[keys.start : keys.stop].detach().numpy()
    lens = np.clip(legal_len.numpy() - keys.start, 0, len(keys))
    for first in range(0, len(operands.q), _QUERIES):
        rows = slice(first, first + _QUERIES)
        q = operands.q[rows].detach().float().numpy()
        weights = operands.weights[rows].detach().numpy()
        _score_rows(*map(readonly, (q, columns, weights, scale, lens[rows])), out[rows].numpy())


@exact_kernel
def _score_rows(
    q: NDArray[Any],  # [num_queries, num_heads, head_dim] float32
    columns: NDArray[Any],  # [head_dim, a multiple of LANES] float32
    weights: NDArray[Any],
    scale: NDArray[Any],
    lens: NDArray[Any],
    out: NDArray[Any],
) -> None:
    products, scores = np.empty(LANES, dtype=np.float32), np.empty(LANES, dtype=np.float32)
    for row in range(q.shape[0]):
        for first in range(0, lens[row], LANES):
            scores[:] = float32(0)
            for head in range(q.shape[1]):
                products[:] = float32(0)
                for dim in range(q.shape[2]):
                    factor = q[row, head, dim]
                    for lane in range(LANES):
                        products[lane] += factor * columns[dim, first + lane]
                weight = weights[row, head]
                for lane in range(LANES):
                    product = products[lane]
                    # this comparison keeps NaN
                    scores[lane] += weight * (float32(0) if product < 0 else product)
            for lane in range(min(LANES, lens[row] - first)):
                out[row, first + lane] = scores[lane] * scale[first + lane]
