"""Draw the next token from a step's logits, and say how likely it was."""

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from workers.serving.messages import Sampling

_FIRST_LOOK = 256  # likeliest tokens that are sorted before more are


def adjusted(
    logits: NDArray[np.float32],  # [vocab_size]
    sampling: Sampling,
    token_ids: Sequence[int],  # of the answer so far
    in_prompt: NDArray[np.bool_] | None,  # [vocab_size]: context or question has the token; None: nobody asks
    allowed: NDArray[np.bool_] | None,  # [vocab_size]: by the grammar; None: all
) -> NDArray[np.float32]:
    """The logits after repetition, frequency and presence penalty and bias, in that order; -inf where forbidden.

    The logits themselves where nothing is asked for; they are never changed. A bias for an id beyond the vocabulary
    has no effect.
    """
    out = logits
    seen, counts = np.unique(np.asarray(token_ids, np.int64), return_counts=True)
    if in_prompt is not None and sampling.repetition_penalty != 1.0:
        repeated = in_prompt.copy()
        repeated[seen] = True
        factor = np.float32(sampling.repetition_penalty)
        out = np.where(repeated, np.where(out > 0, out / factor, out * factor), out)
    if len(seen) and (sampling.frequency_penalty or sampling.presence_penalty):
        out = out.copy()
        out[seen] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
    if sampling.logit_bias:
        out = out.copy()
        for token_id, bias in sampling.logit_bias:
            out[token_id : token_id + 1] += np.float32(bias)
    return out if allowed is None else np.where(allowed, out, np.float32(-np.inf))


def allowed_without(
    allowed: NDArray[np.bool_] | None,  # [vocab_size]; None: all
    token_ids: Set[int],
    vocab_size: int,
) -> NDArray[np.bool_] | None:
    """What is allowed but these tokens; as it was where nothing else is."""
    ids = [token_id for token_id in token_ids if token_id < vocab_size]
    if not ids:
        return allowed
    others = np.ones(vocab_size, np.bool_) if allowed is None else allowed.copy()
    others[ids] = False
    return others if others.any() else allowed


def draw(
    logits: NDArray[np.float32],  # [vocab_size]
    sampling: Sampling,
    seed: int,
    position: int,  # of the token in the answer
) -> int:
    """The likeliest token where temperature is 0; else one of the top_k likeliest that have min_p of the likeliest
    one's share, of which those are kept that together have a share of top_p.

    The same logits, seed and position give the same token, whatever else is decoded beside it. Among equally likely
    tokens the lowest id counts as the likelier one. Raises ValueError where NaN or infinity is the greatest logit.
    """
    greatest = float(logits.max())  # NaN, if there is one
    if not np.isfinite(greatest):
        raise ValueError(f"the greatest is {greatest}")
    if sampling.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf, as it should
        weights = np.exp((logits.astype(np.float64) - greatest) / sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0  # the likeliest one's weight is 1
    if 0 < sampling.top_k < len(weights):
        kept = likeliest(weights, sampling.top_k)
        weights = np.where(np.isin(np.arange(len(weights)), kept), weights, 0.0)
    token_ids, shares = _nucleus(weights / weights.sum(), sampling.top_p)
    cumulative = np.cumsum(shares)
    at = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * cumulative[-1]
    return int(token_ids[np.searchsorted(cumulative, at, side="right")])


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log-softmax, before temperature. logits: [vocab_size] -> the same shape."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def likeliest(values: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Ids of the num greatest, by (value descending, id ascending). values: [vocab_size] -> [at most num]."""
    if num <= 0:
        return np.zeros(0, np.int64)
    if num < len(values):  # ties with the last one stay in, so that their ids decide
        candidates = np.flatnonzero(values >= np.partition(values, -num)[-num])
    else:
        candidates = np.arange(len(values))
    return np.asarray(candidates[np.argsort(-values[candidates], kind="stable")][:num])


def _nucleus(shares: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The fewest of the likeliest tokens that have top_p together: ids and shares, likeliest first; at least one."""
    if top_p >= 1.0:
        return np.arange(len(shares)), shares
    num = _FIRST_LOOK
    while True:
        token_ids = likeliest(shares, num)
        cumulative = np.cumsum(shares[token_ids])
        if cumulative[-1] >= top_p or len(token_ids) == len(shares):
            kept = token_ids[: int(np.searchsorted(cumulative, top_p, side="left")) + 1]
            return kept, shares[kept]
        num *= 16
