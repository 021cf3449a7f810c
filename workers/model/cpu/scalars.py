"""Scalar functions in float32 that several stages share."""

from typing import Any

import numpy as np

from csattn.cpu.jit import exact_kernel


@exact_kernel
def sigmoid(x: np.float32) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@exact_kernel
def softplus(x: np.float32) -> Any:
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
