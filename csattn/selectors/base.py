"""The interface of all selectors: prepared once per layer of a context, then one object per request and layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import SearchConfig
from csattn.errors import ArrayError
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
        """Choose for one token: of the middle, and of the rows that were appended. Not valid after the next call.

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


def require_choice(name: str, chosen: object, view: ContextView, num_heads: tuple[int, int], num_left: int) -> None:
    """Raise ArrayError unless a selector of somebody's own gave what `Selector.select` is to give.

    num_heads: of keys, and of queries; num_left: rows that were appended.
    """
    of_rows, of_heads = (getattr(chosen, field, None) for field in ("kv_indices", "valid_len"))
    if not isinstance(of_rows, np.ndarray) or not isinstance(of_heads, np.ndarray):
        raise ArrayError(f"selector {name} gave {chosen!r}; wanted a Selection of numpy arrays")
    if of_rows.ndim != 2 or len(of_rows) not in num_heads or of_heads.shape != of_rows.shape[:1]:
        raise ArrayError(
            f"selector {name} gave kv_indices of shape {list(of_rows.shape)} and valid_len of {list(of_heads.shape)}; "
            f"wanted [heads, rows] and [heads], of {' or '.join(map(str, dict.fromkeys(num_heads)))} heads"
        )
    if (of_heads > of_rows.shape[1]).any():
        raise ArrayError(f"selector {name} gave a valid_len of {of_heads.max()} and {of_rows.shape[1]} rows a head")
    first, end, context_len = view.middle.start, view.middle.stop, view.context_len
    is_free = (of_rows >= first) & (of_rows < end)
    is_free |= (of_rows >= context_len) & (of_rows < context_len + num_left)
    is_row = np.arange(of_rows.shape[1]) < of_heads[:, None]
    is_right = np.where(is_row, is_free, of_rows == -1)
    is_right[:, 1:] &= ~is_row[:, 1:] | (np.diff(of_rows, axis=1) > 0)
    if not is_right.all():
        head, place = np.argwhere(~is_right)[0]
        raise ArrayError(
            f"selector {name} gave {of_rows[head, place]} at place {place} of head {head}, of {of_heads[head]} rows; "
            f"wanted them ascending, each once, from {first} up to {end} or {context_len} up to "
            f"{context_len + num_left}, and -1 after them"
        )
