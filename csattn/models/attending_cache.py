"""A `transformers` cache whose layers keep rows in a way of their own and attend to them themselves."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from csattn.errors import ConfigError

# transformers' name of a cache among a model's arguments and results: from 5.24 on `cache`
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def cache_in(arguments: dict[str, Any]) -> Any:
    """The cache that a model is called with, by either name; None without one."""
    return arguments.get("cache", arguments.get("past_key_values"))


class AttendingRows(Protocol):
    """One sequence's rows in one layer. `append` a step's keys and values, then `attend` with its queries."""

    @property
    def kv_len(self) -> int:
        """Tokens that have been appended, whether their rows are still kept or not."""
        ...

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [num_kv_heads, num_tokens, head_dim], as the model's attention made them."""
        ...

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        """Attend from the last appended tokens. q: [num_q_heads, num_tokens, head_dim] -> out, same shape."""
        ...


class AttendingCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """One sequence as transformers sees it. Works in a model that attends by `attention_implementation`."""

    def __init__(self, rows: Sequence[AttendingRows]):
        """rows: one for each layer."""
        super().__init__(layers=[_CacheLayer(layer_rows) for layer_rows in rows])


class _CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer of the cache: takes keys and values, hands itself to the attention function."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, rows: AttendingRows):
        super().__init__()
        self._rows = rows

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do: the rows are there from the start."""

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
        """Of a step's own rows alone: for these transformers makes no mask, and the rows know what a token sees."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1
