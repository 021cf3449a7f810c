"""The definition of sampling a token, in float64, against which `draw_kernel` is tested."""

import numpy as np
from numpy.typing import NDArray

from workers.serving.messages import Sampling


def kept_reference(logits: NDArray[np.float32], sampling: Sampling) -> list[int]:
    """Return the ids that may be drawn, ascending: of the top_k most likely tokens those with at least min_p of the
    greatest probability; of these, the fewest most likely that have top_p of their sum. Ties go to the lower id."""
    shares = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    ids = sorted(np.flatnonzero(shares > np.finfo(np.float32).tiny), key=lambda i: (-shares[i], i))
    ids = [i for i in ids[: sampling.top_k or None] if shares[i] >= sampling.min_p]
    wanted, total, kept = sampling.top_p * shares[ids].sum(), 0.0, []
    for token_id in ids:
        kept.append(int(token_id))
        total += shares[token_id]
        if total >= wanted:
            break
    return sorted(kept)


def draw_reference(logits: NDArray[np.float32], sampling: Sampling, at: float, margin: float = 2e-6) -> set[int]:
    """Return the first id up to which the kept tokens, by id, have more than `at`, in [0, 1), of their sum.

    It returns several ids where rounding to float32 may decide between them: within the margin.
    """
    kept = kept_reference(logits, sampling)
    shares = np.exp((logits[kept].astype(np.float64) - logits.max()) / sampling.temperature)
    cumulative = np.cumsum(shares) / shares.sum()
    first, last = np.searchsorted(cumulative, [at - margin, at + margin], side="right")
    return set(kept[first : last + 1])
