"""Where a transformers model's attention meets ours: the cache hands over an object that attends."""

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "csattn"
_lock = Lock()
_open: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()  # by model: how many, and its own way


class attention_implementation:
    """Let a model attend through our hook for a while, in any thread. Reentrant; the last that ends puts the model's
    own way back."""

    def __init__(self, model: Any):
        self._model = model

    def __enter__(self) -> None:
        with _lock:
            number, own = _open.get(self._model, (0, self._model.config._attn_implementation))
            if number == 0:
                self._model.set_attn_implementation(IMPLEMENTATION)
            _open[self._model] = number + 1, own

    def __exit__(self, *exc: object) -> None:
        with _lock:
            number, own = _open.pop(self._model)
            if number > 1:
                _open[self._model] = number - 1, own
            else:
                self._model.set_attn_implementation(own)


def _attention(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    if isinstance(key, Tensor):  # an ordinary cache in a model that is also used with ours
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    # the cache's `update` has given its layer: q [batch_size, num_q_heads, q_len, head_dim] after RoPE -> out, likewise
    return key.attend(query, scaling).transpose(1, 2).contiguous(), None


# Without the mask function a model in this mode would get no mask at all, and an ordinary cache's
# chunked prefill would be wrong without a word.
AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
