"""The interface of all selectors: data prepared once per layer of a context, then one object per request and layer."""

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
    """The part of a context that a selector may choose from, and the configuration of the search."""

    context_len: int
    softmax_scale: float
    config: SearchConfig
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)

    @property
    def middle(self) -> slice:
        """The context's rows without its resident sinks and window; empty if those cover it."""
        first = min(self.config.sink_len, self.context_len)
        return slice(first, max(first, self.context_len - self.config.window_len))

    @property
    def top_k(self) -> int:
        return self.config.top_k(self.context_len)

    @property
    def everything_kept(self) -> bool:
        """Whether top_k covers the whole middle, so that no choice is left."""
        num_middle: int = self.middle.stop - self.middle.start
        return self.top_k >= num_middle


@dataclass(frozen=True, slots=True, eq=False)
class ContextLayer:
    """One layer of a context, as a selector may read it: in place, shared by all requests."""

    keys: Tensor  # [num_kv_heads, context_len, head_dim], after RoPE
    values: Tensor  # [num_kv_heads, context_len, head_dim]
    num_q_heads: int
    # returns [num_q_heads, context_len] float32: each key's softmax weight, summed over the context's own queries; a
    # call may run the model over the context
    attention_received: Callable[[], Tensor]

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.keys.shape[0]


class Selector(Protocol):
    """Chooses the far rows of one layer for one request.

    `append` and `select` replace attributes and never change them in place, so a shallow copy is a snapshot. The lists
    of `csattn` are the exception: they are rebuilt from the rows that were appended.
    """

    @property
    def search_bytes(self) -> int:
        """The bytes that the last `select` had to read to choose, with keys in the dtype of the KV."""
        ...

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Add the row that leaves the tail's window to the choice. k, v: [num_kv_heads, head_dim], k after RoPE."""
        ...

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        """Choose rows for one token among the middle and the appended rows. The result is valid until the next call.

        q: [num_q_heads, head_dim], after RoPE.
        recent: [num_kv_heads, num_recent, 2, head_dim], the tail's resident rows. They count in a softmax, but may not
        be chosen. The last is the token's own, unless the search runs a layer ahead.
        """
        ...


class Prepared(Protocol):
    """A selector's data for one layer of a context: made once, shared by all requests."""

    @property
    def index_bytes(self) -> int:
        """The bytes that it holds besides the KV."""
        ...

    def selector(self, view: ContextView) -> Selector:
        """Make the selector of a new request."""
        ...


def require_choice(
    name: str, chosen: object, view: ContextView, num_kv_heads: int, q_shape: tuple[int, ...], num_left: int
) -> None:
    """Raise ArrayError unless the result of a registered selector is what `Selector.select` has to return.

    q_shape: [num_q_heads, head_dim]; num_left: the number of appended rows. `log_weights` and `rest` may be NaN, as
    they are for a query that is NaN; attention's output then is NaN, too.
    """
    if not isinstance(chosen, Selection):
        raise ArrayError(f"selector {name} gave {chosen!r}; wanted a Selection of numpy arrays")
    of_rows, of_heads = chosen.kv_indices, chosen.valid_len
    _require_array(f"selector {name} gave kv_indices", of_rows, (np.int32, np.int64))
    _require_array(f"selector {name} gave valid_len", of_heads, (np.int32, np.int64))
    if of_rows.ndim != 2 or len(of_rows) not in (num_kv_heads, q_shape[0]) or of_heads.shape != of_rows.shape[:1]:
        raise ArrayError(
            f"selector {name} gave kv_indices of shape {list(of_rows.shape)} and valid_len of {list(of_heads.shape)}; "
            f"wanted [heads, rows] and [heads], of {' or '.join(map(str, dict.fromkeys((num_kv_heads, q_shape[0]))))} "
            "heads"
        )
    wrong = of_heads[(of_heads < 0) | (of_heads > of_rows.shape[1])]
    if len(wrong):
        raise ArrayError(f"selector {name} gave a valid_len of {wrong[0]} and {of_rows.shape[1]} rows a head")
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
    floats = np.float32, np.float64
    if chosen.log_weights is not None:
        _require_array(f"selector {name} gave log_weights", chosen.log_weights, floats, of_rows.shape)
    if chosen.rest is not None:
        out, share = (getattr(chosen.rest, field, None) for field in ("out", "share"))
        _require_array(f"selector {name} gave rest.out", out, floats, q_shape)
        _require_array(f"selector {name} gave rest.share", share, floats, q_shape[:1])
        if len(wrong := chosen.rest.share[(chosen.rest.share < 0) | (chosen.rest.share > 1)]):
            raise ArrayError(f"selector {name} gave a rest.share of {wrong[0]}; wanted 0 to 1")


def _require_array(
    what: str, array: object, dtypes: tuple[type[np.generic], ...], shape: tuple[int, ...] | None = None
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype not in dtypes:
        came = f"of {array.dtype}" if isinstance(array, np.ndarray) else f"of type {type(array).__name__}"
        raise ArrayError(f"{what} {came}; wanted a numpy array of {' or '.join(one.__name__ for one in dtypes)}")
    if shape is not None and array.shape != shape:
        raise ArrayError(f"{what} of shape {list(array.shape)}; wanted {list(shape)}")
