"""The definition of sampling a token, in float64, against which `draw_kernel` is tested."""

import numpy as np
from numpy.typing import NDArray

from workers.serving.messages import Sampling


def kept_reference(logits: NDArray[np.float32], sampling: Sampling) -> list[int]:
    """Return the ids that may be drawn, ascending: of the top_k most likely tokens those with at least min_p of the
    greatest probability; of these, the fewest most likely that have top_p of their sum. Ties go to the lower id."""
    shares = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    ids = np.flatnonzero(shares > np.finfo(np.float32).tiny)
    ids = ids[np.argsort(-shares[ids], kind="stable")][: sampling.top_k or None]
    ids = ids[shares[ids] >= sampling.min_p]
    wanted = sampling.top_p * shares[ids].sum()
    num_kept = np.searchsorted(np.cumsum(shares[ids]), wanted) + 1
    return sorted(ids[:num_kept].tolist())


def draw_reference(logits: NDArray[np.float32], sampling: Sampling, at: float, margin: float = 2e-6) -> set[int]:
    """Return the first id up to which the kept tokens, by id, have more than `at`, in [0, 1), of their sum.

    It returns several ids where rounding to float32 may decide between them: within the margin.
    """
    kept = kept_reference(logits, sampling)
    shares = np.exp((logits[kept].astype(np.float64) - logits.max()) / sampling.temperature)
    cumulative = np.cumsum(shares) / shares.sum()
    first, last = np.searchsorted(cumulative, [at - margin, at + margin], side="right")
    return set(kept[first : last + 1])
