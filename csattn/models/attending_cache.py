"""A `transformers` cache whose layers store rows their own way, and compute the attention to them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from csattn.errors import ConfigError

# transformers' name of the cache argument and result of a model: `cache` from 5.24 on
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache among a model's arguments, under either name; None without one."""
    return arguments.get("cache", arguments.get("past_key_values"))


class AttendingRows(Protocol):
    """The rows of one sequence in one layer. A step calls `append` with keys and values, then `attend` with queries."""

    @property
    def kv_len(self) -> int:
        """Number of tokens that have been appended, whether their rows are still kept or not."""
        ...

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the next tokens' rows. k, v: [num_kv_heads, num_tokens, head_dim], as the attention module makes them."""
        ...

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last appended tokens. q: [num_q_heads, num_tokens, head_dim] -> out, same shape."""
        ...


class AttendingCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The cache of one sequence for transformers. The model must attend by `attention_implementation`."""

    def __init__(self, rows: Sequence[AttendingRows]):
        """rows: one for each layer."""
        super().__init__(layers=[_CacheLayer(layer_rows) for layer_rows in rows])


class _CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer of the cache: `update` stores keys and values, and gives the attention function this object as both."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, rows: AttendingRows):
        super().__init__()
        self._rows = rows

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the rows exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[0] != 1:
            raise ConfigError(
                f"a request is one sequence, got a batch of {key_states.shape[0]}; make one request per sequence, "
                "without beams and with num_return_sequences=1"
            )
        self._rows.append(key_states[0], value_states[0])
        return self, self

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        return self._rows.attend(q[0], softmax_scale)[None]

    def get_seq_length(self) -> int:
        return self._rows.kv_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Report only a step's own rows: then transformers makes no mask, and `attend` knows what a token sees."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1
