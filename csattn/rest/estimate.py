"""The compiled estimate of the rest: for each head, two products of the query with a matrix and a few scalars."""

import math

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel, readonly
from csattn.rest.moments import Moments

_FAR_TAIL = -8.0  # below it, the distribution function is computed by the continued fraction of its tail


def estimate_rest(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    moments: Moments,
    num_chosen: NDArray[np.int32],  # [num_tokens, num_index_heads]
    num_rows: NDArray[np.int64],  # [num_tokens]: the rows that could be chosen
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Estimate attention to the rows that could be chosen and were not: out like q, lse [num_tokens, num_q_heads].

    Where all are chosen, out is zero and lse is -inf. `reference.estimate_rest` is the definition.
    """
    num_index_heads = num_chosen.shape[1]
    assert q.shape[1] % num_index_heads == 0, f"{q.shape[1]} query heads cannot be divided among {num_index_heads}"
    out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    _estimate(readonly(q), readonly(moments.table), num_chosen, num_rows, softmax_scale, out, lse)
    return out, lse


@exact_kernel
def _estimate(
    q: NDArray[np.float32],
    table: NDArray[np.float32],
    num_chosen: NDArray[np.int32],
    num_rows: NDArray[np.int64],
    softmax_scale: float,
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:
    num_tokens, num_q_heads, _ = q.shape
    for token in range(num_tokens):
        for head in range(num_q_heads):
            of_kv_head = table[head * table.shape[0] // num_q_heads].reshape(-1)
            chosen = num_chosen[token, head * num_chosen.shape[1] // num_q_heads]
            lse[token, head] = rest_of_head(
                q[token, head], of_kv_head, chosen, num_rows[token], softmax_scale, out[token, head]
            )


@exact_kernel
def rest_of_head(
    q: NDArray[np.float32],  # [head_dim]
    table: NDArray[np.float32],  # [(2 + 2 * head_dim) * head_dim]: a KV head's part of `Moments.table`
    num_chosen: int,
    num_rows: int,
    softmax_scale: float,
    out: NDArray[np.float32],  # [head_dim], written
) -> float:
    """Estimate attention to the rest for one query head; write out and return the log-sum-exp."""
    head_dim = len(q)
    if num_chosen >= num_rows:
        out[:] = 0.0
        return -np.inf
    of_keys = np.zeros(head_dim, np.float32)
    out[:] = 0.0
    mean, square = 0.0, 0.0
    for i in range(head_dim):
        key_cov, cross_cov = (2 + i) * head_dim, (2 + head_dim + i) * head_dim
        mean += np.float64(q[i]) * table[i]
        for j in range(head_dim):
            of_keys[j] += q[i] * table[key_cov + j]
            out[j] += q[i] * table[cross_cov + j]
    for i in range(head_dim):
        square += np.float64(q[i]) * of_keys[i]
    spread = softmax_scale * math.sqrt(max(square, 0.0))
    log_below, ratio = 0.0, 0.0
    if num_chosen > 0:
        log_below, ratio = _log_cdf(_upper_quantile(num_chosen / num_rows) - spread)
    slope = np.float32(softmax_scale * (spread - ratio) / spread) if spread > 0.0 else np.float32(0.0)
    for i in range(head_dim):
        out[i] = table[head_dim + i] + slope * out[i]
    return math.log(num_rows) + softmax_scale * mean + spread * spread / 2.0 + log_below


@exact_kernel
def _upper_quantile(share: float) -> float:
    """The upper quantile of the standard normal: the x that a share in (0, 1) of it exceeds.

    Newton's method on the logarithm of the share, which is concave: no step overshoots the result.
    """
    x = 0.0
    for _ in range(64):
        log_above, ratio = _log_cdf(-x)
        step = (log_above - math.log(share)) / ratio
        x += step
        if abs(step) < 1e-12 * max(1.0, abs(x)):
            break
    return x


@exact_kernel
def _log_cdf(x: float) -> tuple[float, float]:
    """For the standard normal: log of its distribution function F at x, and its density at x divided by F(x)."""
    log_density = -x * x / 2.0 - 0.5 * math.log(2.0 * math.pi)
    if x > _FAR_TAIL:
        log_below = math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
        return log_below, math.exp(log_density - log_below)
    ratio = -x
    for k in range(12, 0, -1):  # Laplace's continued fraction: off by 1e-13 at most
        ratio = -x + k / ratio
    return log_density - math.log(ratio), ratio
