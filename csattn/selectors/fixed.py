"""Selectors that do not look: everything, and nothing."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.selectors.base import ContextLayer, ContextView


class FullSelector:
    """All of the context and all of the tail: full attention."""

    indexes_tail = False
    search_bytes = 0

    def __init__(self, layer: ContextLayer, view: ContextView):
        self._middle = view.middle

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        raise AssertionError("the whole tail stays resident under full attention")

    def select(self, q: NDArray[np.float32], recent: Tensor) -> slice:
        return self._middle


class WindowSelector:
    """Sinks and recent rows only (StreamingLLM, arXiv:2309.17453)."""

    indexes_tail = True
    search_bytes = 0

    def __init__(self, layer: ContextLayer, view: ContextView):
        self._nothing = slice(view.middle.start, view.middle.start)

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """The row is dropped."""

    def select(self, q: NDArray[np.float32], recent: Tensor) -> slice:
        return self._nothing
