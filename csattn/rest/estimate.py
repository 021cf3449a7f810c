"""The estimate of the rest, compiled: two products of a query with a matrix, and a few numbers per head."""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel, readonly
from csattn.rest.moments import Moments

_FAR_DOWN = -8.0  # below, the distribution is computed from its tail's continued fraction


def estimate_rest(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    moments: Moments,
    num_chosen: NDArray[np.int32],  # [num_tokens, num_index_heads]
    num_rows: NDArray[np.int64],  # [num_tokens]: the rows that could be chosen
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention to the rows that could be chosen and were not: out like q, lse [num_tokens, num_q_heads].

    Where all are chosen, out is zero and lse is -inf. `reference.estimate_rest` is the definition.
    """
    num_index_heads = num_chosen.shape[1]
    assert q.shape[1] % num_index_heads == 0, f"{q.shape[1]} query heads cannot be shared out to {num_index_heads}"
    shares = np.minimum(num_chosen / np.maximum(num_rows, 1)[:, None], 1.0)
    distinct, which = np.unique(shares, return_inverse=True)
    cuts = np.array([_quantile(1.0 - share) for share in distinct])[which].reshape(shares.shape)
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    arrays = [moments.key_mean, moments.value_mean, moments.key_cov, moments.cross_cov]
    rows = np.maximum(num_rows, 1).astype(np.float64)
    _estimate(readonly(q), *map(readonly, arrays), cuts, rows, softmax_scale, out, lse)
    return out, lse


def _quantile(share: float) -> float:
    if 0.0 < share < 1.0:
        return NormalDist().inv_cdf(share)
    return math.inf if share > 0.0 else -math.inf


@exact_kernel
def _estimate(
    q: NDArray[np.float32],
    key_mean: NDArray[np.float32],
    value_mean: NDArray[np.float32],
    key_cov: NDArray[np.float32],
    cross_cov: NDArray[np.float32],
    cuts: NDArray[np.float64],  # [num_tokens, num_index_heads]: the standard normal's quantile that was chosen above
    num_rows: NDArray[np.float64],  # [num_tokens]
    softmax_scale: float,
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    of_keys, of_values = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for token in range(num_tokens):
        for head in range(num_q_heads):
            kv_head = head * key_mean.shape[0] // num_q_heads
            quantile = cuts[token, head * cuts.shape[1] // num_q_heads]
            if quantile == -np.inf:
                out[token, head], lse[token, head] = 0.0, -np.inf
                continue
            of_keys[:], of_values[:] = 0.0, 0.0
            for i in range(head_dim):
                part = q[token, head, i]
                for j in range(head_dim):
                    of_keys[j] += part * key_cov[kv_head, i, j]
                    of_values[j] += part * cross_cov[kv_head, i, j]
            mean, square = 0.0, 0.0
            for i in range(head_dim):
                mean += np.float64(q[token, head, i]) * key_mean[kv_head, i]
                square += np.float64(q[token, head, i]) * of_keys[i]
            spread = softmax_scale * math.sqrt(max(square, 0.0))
            log_below, ratio = _below(quantile - spread)
            lse[token, head] = math.log(num_rows[token]) + softmax_scale * mean + spread * spread / 2.0 + log_below
            slope = np.float32(softmax_scale * (spread - ratio) / spread) if spread > 0.0 else np.float32(0.0)
            for i in range(head_dim):
                out[token, head, i] = value_mean[kv_head, i] + slope * of_values[i]


@exact_kernel
def _below(x: float) -> tuple[float, float]:
    """Of the standard normal: log of the share below x, and the density at x over that share."""
    if x == np.inf:
        return 0.0, 0.0
    log_density = -x * x / 2.0 - 0.5 * math.log(2.0 * math.pi)
    if x > _FAR_DOWN:
        log_below = math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
        return log_below, math.exp(log_density - log_below)
    ratio = -x
    for k in range(12, 0, -1):  # Laplace's continued fraction: 1e-13 at most
        ratio = -x + k / ratio
    return log_density - math.log(ratio), ratio
