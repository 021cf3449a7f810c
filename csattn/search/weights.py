"""Integer subspace weights, so that a sum of quantised scores is the same integer in every implementation."""

import numpy as np
from numpy.typing import NDArray

from csattn.jit import exact_kernel

MAX_SCORE = 32767  # of int16


@exact_kernel
def weight_room(num_subspaces: int, largest_code: int) -> float:
    """What is left of MAX_SCORE for the weights themselves once each may be rounded up by one half.

    One is kept back for the rounding of the float64 arithmetic. Zero or less: too many subspaces for int16.
    """
    return MAX_SCORE - 1 - largest_code * num_subspaces / 2


@exact_kernel
def integer_weights(
    scaled: NDArray[np.float64],  # [num_subspaces] >= 0: weight * scale of the chosen row
    largest_code: int,
) -> tuple[float, NDArray[np.int64]]:
    """unit and W [num_subspaces] with scaled ~ unit * W and largest_code * sum(W) <= 32767.

    unit = sum(scaled) * largest_code / room, W_b = round-half-even(scaled_b / unit). Rounding adds at most one
    half to each W_b, which is what `weight_room` sets aside, so |sum of W_b * code_b| <= 32767 for all codes.
    int16 lanes may therefore wrap around while the sum is being built: the final value is in range.
    A query with no weight at all (or with no finite one) has unit 0 and only zero weights.
    """
    multipliers = np.zeros(len(scaled), np.int64)
    total = 0.0
    for b in range(len(scaled)):
        total += scaled[b]
    unit = total * largest_code / weight_room(len(scaled), largest_code)
    if not 0.0 < unit < np.inf:
        return 0.0, multipliers
    for b in range(len(scaled)):
        multipliers[b] = np.rint(scaled[b] / unit)
    return unit, multipliers
