"""Where a transformers model's attention meets ours: the cache hands over an object that attends."""

from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "csattn"


class attention_implementation:
    """Let a model attend through our hook for a while. Reentrant; the model's own way is put back at the end."""

    def __init__(self, model: Any):
        self._model = model

    def __enter__(self) -> None:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(IMPLEMENTATION)

    def __exit__(self, *exc: object) -> None:
        self._model.set_attn_implementation(self._before)


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
