"""The interface of all selectors: one object per request and layer."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from csattn.config import SearchConfig
from csattn.selection import Selection

# Rows to attend besides the resident ones: chosen ones, or a range that needs no gather.
FarRows = Selection | slice


@dataclass(frozen=True, slots=True)
class ContextView:
    """The part of a context that a selector may choose from, and how."""

    context_len: int
    softmax_scale: float
    config: SearchConfig

    @property
    def middle(self) -> slice:
        """The context without its resident sinks and window; empty when those cover it."""
        first = min(self.config.sink_len, self.context_len)
        return slice(first, max(first, self.context_len - self.config.window_len))

    @property
    def top_k(self) -> int:
        return self.config.top_k(self.context_len)

    @property
    def everything_kept(self) -> bool:
        """Whether top_k covers the whole middle, so that there is nothing to choose."""
        num_middle: int = self.middle.stop - self.middle.start
        return self.top_k >= num_middle


class Selector(Protocol):
    """Chooses the far rows of one layer for one request."""

    @property
    def indexes_tail(self) -> bool:
        """Whether rows of the tail leave its window into the selector. If not, the whole tail stays resident."""
        ...

    def append(self, k: NDArray[np.float32]) -> None:
        """Take over the oldest row of the tail's window. k: [num_kv_heads, head_dim], after RoPE."""
        ...

    def select(self, q: NDArray[np.float32]) -> FarRows:
        """Choose for one token. q: [num_q_heads, head_dim], after RoPE. Not valid after the next call."""
        ...
