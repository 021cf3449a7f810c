"""The definition of the estimate, in float64.

Let a head's logits of the N rows be normal with mean m and variance s^2, and let the n chosen rows have the largest:
those above the quantile m + c s, where c is the standard normal's quantile at 1 - n / N. Then, over the other rows,

    sum of e^logit                             = N e^(m + s^2 / 2) F(c - s)
    mean of the logits, weighted by e^logit    = m + s (s - f(c - s) / F(c - s))

(f, F: density and distribution function of the standard normal), because weighting by e^logit shifts a normal
distribution by s^2. The weighted mean of the values follows from that of the logits by linear regression, with the
covariance of keys and values.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.rest.moments import Moments


def estimate_rest(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    moments: Moments,
    num_chosen: NDArray[np.int32],  # [num_tokens, num_index_heads]: n
    num_rows: NDArray[np.int64],  # [num_tokens]: N, the rows that may be chosen
    softmax_scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Estimate attention to the rows that could be chosen and were not: out like q, lse [num_tokens, num_q_heads].

    Where all are chosen, out is zero and lse is -inf.
    """
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, num_index_heads = moments.key_mean.shape[0], num_chosen.shape[1]
    out, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:2], -np.inf, np.float32)
    for token in range(num_tokens):
        for head in range(num_q_heads):
            kv_head, index_head = head * num_kv_heads // num_q_heads, head * num_index_heads // num_q_heads
            chosen, rows = int(num_chosen[token, index_head]), int(num_rows[token])
            if chosen < rows:
                of_head = _of_head(q[token, head], moments, kv_head, chosen / rows, softmax_scale)
                out[token, head], lse[token, head] = of_head[0], of_head[1] + np.log(rows)
    return out, lse


def _of_head(
    q: NDArray[np.float32], moments: Moments, kv_head: int, chosen_share: float, softmax_scale: float
) -> tuple[NDArray[np.float64], float]:
    """The weighted mean of the values [head_dim], and the log of (the sum of the weights / the number of all rows)."""
    query = softmax_scale * q.astype(np.float64)
    mean = query @ moments.key_mean[kv_head]
    spread = np.sqrt(max(query @ moments.key_cov[kv_head].astype(np.float64) @ query, 0.0))
    cut = torch.special.ndtri(torch.tensor(1.0 - chosen_share, dtype=torch.float64)) - spread
    log_below = torch.special.log_ndtr(cut)
    density = torch.exp(-cut.square() / 2 - log_below) / np.sqrt(2 * np.pi)
    value = moments.value_mean[kv_head].astype(np.float64)
    if spread > 0:
        value = value + (spread - float(density)) / spread * (query @ moments.cross_cov[kv_head])
    return value, float(mean + spread**2 / 2 + float(log_below))
