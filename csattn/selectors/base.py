"""The interface of all selectors: prepared once per layer of a context, then one object per request and layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import SearchConfig
from csattn.selection import Selection


@dataclass(frozen=True, slots=True)
class ContextView:
    """The part of a context that a selector may choose from, and how."""

    context_len: int
    softmax_scale: float
    config: SearchConfig
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)

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


@dataclass(frozen=True, slots=True, eq=False)
class ContextLayer:
    """What a selector may read of one layer of a context. Read in place, shared by all requests."""

    keys: Tensor  # [num_kv_heads, context_len, head_dim], after RoPE
    values: Tensor  # the same
    num_q_heads: int
    # [num_q_heads, context_len] float32: each key's softmax weights, summed over the context's own queries.
    # Asking for it may run the model over the context.
    attention_received: Callable[[], Tensor]

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.keys.shape[0]


class Selector(Protocol):
    """Chooses the far rows of one layer for one request.

    What `append` and `select` change of a selector they replace, so that a shallow copy is a snapshot. Of the lists of
    `csattn` it is none: they are made again of the rows that they were made of.
    """

    @property
    def search_bytes(self) -> int:
        """Bytes that the last `select` had to read to choose: keys as wide as the KV has them."""
        ...

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Take over the oldest row of the tail's window. k, v: [num_kv_heads, head_dim], k after RoPE."""
        ...

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        """Choose for one token. Not valid after the next call.

        q: [num_q_heads, head_dim], after RoPE.
        recent: [num_kv_heads, num_recent, 2, head_dim], the tail's resident rows: to weigh against, not to choose.
        The last is the token's own, unless the search runs ahead of it.
        """
        ...


class Prepared(Protocol):
    """What a selector has made of one layer of a context: made once, shared by all requests."""

    @property
    def index_bytes(self) -> int:
        """Bytes that it holds beside the KV."""
        ...

    def selector(self, view: ContextView) -> Selector:
        """For a new request."""
        ...
