"""The attention function that transformers calls: our caches pass an object that computes the attention."""

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "csattn"

_lock = Lock()
# by model: how many `attention_implementation` are open, and the model's own implementation
_num_open: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


class attention_implementation:
    """While open, a model attends through our hook.

    Any number may be open on a model and end in any order, on any threads; the last one restores the model's own
    implementation.
    """

    def __init__(self, model: Any):
        self._model = model

    def __enter__(self) -> None:
        with _lock:
            number, before = _num_open.get(self._model, (0, self._model.config._attn_implementation))
            if number == 0:
                self._model.set_attn_implementation(IMPLEMENTATION)
            _num_open[self._model] = number + 1, before

    def __exit__(self, *exc: object) -> None:
        with _lock:
            number, before = _num_open.pop(self._model)
            if number > 1:
                _num_open[self._model] = number - 1, before
            else:
                self._model.set_attn_implementation(before)


def _attention(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    if isinstance(key, Tensor):  # an ordinary cache in a model that is also used with ours
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    # key: the cache's layer, by its `update`; q (after RoPE) and out: [batch_size, num_q_heads, q_len, head_dim]
    return key.attend(query, scaling).transpose(1, 2).contiguous(), None


# Without the mask function, a model in this mode would get no mask at all, and chunked prefill with an ordinary cache
# would be silently wrong.
AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
