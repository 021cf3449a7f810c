"""Prefill layer by layer: every layer's post-RoPE queries, keys and values, one layer in memory at a time.

The hidden states of the whole context pass through layer 0, then through layer 1, and so on, in chunks of rows.
So memory holds one layer's q, k and v whatever the depth, and a build can resume at any layer from the hidden
states that enter it. Everything is held where the model is.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from csattn.attention import attend_chunk
from csattn.errors import CaptureError
from csattn.models.attention_hook import attention_implementation
from csattn.models.query import embed

CHUNK_LEN = 1024
CHUNK_LEN_ON_GPU = 8192


@dataclass(slots=True)
class LayerCapture:
    """One layer's view of the context. The arrays are reused by the next layer: take what you keep."""

    layer_idx: int
    q: Tensor  # [num_q_heads, context_len, head_dim]
    kv: Tensor  # [num_kv_heads, context_len, 2, head_dim]: K and V of one key side by side
    hidden_in: Tensor  # [context_len, hidden_size], what entered the layer


class _CapturingLayer:
    """Stands in for keys and values: keeps them, and attends to all that it has kept."""

    def __init__(self, capture: LayerCapture):
        self._capture = capture
        self._num_rows = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        chunk = slice(self._num_rows, self._num_rows + k.shape[2])
        self._capture.kv[:, chunk, 0] = k[0]
        self._capture.kv[:, chunk, 1] = v[0]
        self._num_rows = chunk.stop

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        rows = self._capture.kv[:, : self._num_rows]
        self._capture.q[:, self._num_rows - q.shape[2] : self._num_rows] = q[0]
        attend = attend_chunk_on_gpu if q.is_cuda else attend_chunk
        return attend(q[0], rows[:, :, 0], rows[:, :, 1], softmax_scale)[None]


class _CapturingCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The part of a transformers cache that a decoder layer calls."""

    def __init__(self, layer: _CapturingLayer):
        super().__init__(layers=[])
        self._layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._layer.append(key_states, value_states)
        return self._layer, self._layer


@torch.inference_mode()
def prefill(
    model: Any,  # transformers causal LM of a supported family
    token_ids: Tensor,  # [context_len] int64
    *,
    resume: tuple[int, Tensor] | None = None,  # a layer, and the hidden states [context_len, hidden_size] entering it
    chunk_len: int | None = None,
    on_chunk: Callable[[int, int], None] = lambda layer_idx, num_rows: None,
) -> Generator[tuple[LayerCapture, Tensor]]:
    """Yield each layer's capture, with the hidden states that leave the layer.

    Raises CaptureError when a layer produces NaN or infinity.
    """
    body, config = model.model, model.config
    context_len = token_ids.shape[0]
    first_layer, hidden = resume or (0, embed(model, token_ids.to(model.device)).clone())
    hidden = hidden.to(model.device)
    chunk_len = chunk_len or (CHUNK_LEN_ON_GPU if hidden.is_cuda else CHUNK_LEN)
    head_dim = body.layers[0].self_attn.head_dim
    positions = torch.arange(context_len, device=hidden.device)[None]
    cos, sin = body.rotary_emb(hidden[None], position_ids=positions)
    q = hidden.new_empty(config.num_attention_heads, context_len, head_dim)
    kv = hidden.new_empty(config.num_key_value_heads, context_len, 2, head_dim)
    with attention_implementation(model):
        for layer_idx in range(first_layer, len(body.layers)):
            capture = LayerCapture(layer_idx, q, kv, hidden)
            cache = _CapturingCache(_CapturingLayer(capture))
            leaving = torch.empty_like(hidden)
            for start in range(0, context_len, chunk_len):
                rows = slice(start, min(start + chunk_len, context_len))
                leaving[rows] = body.layers[layer_idx](
                    hidden[None, rows],
                    attention_mask=None,
                    position_ids=positions[:, rows],
                    past_key_values=cache,
                    use_cache=True,
                    position_embeddings=(cos[:, rows], sin[:, rows]),
                )[0]
                on_chunk(layer_idx, rows.stop - rows.start)
            _require_finite(capture)
            yield capture, leaving
            hidden = leaving


def attend_chunk_on_gpu(
    q: Tensor,  # [num_q_heads, chunk_len, head_dim]
    k: Tensor,  # [num_kv_heads, kv_len, head_dim]; the chunk's own rows are the last chunk_len
    v: Tensor,
    softmax_scale: float,
) -> Tensor:
    """`attend_chunk` by the fused kernels that torch has for GPUs: [num_q_heads, chunk_len, head_dim]."""
    grouped = q.dtype != torch.float32
    if not grouped:  # the kernel that takes float32 knows no groups
        k, v = (rows.repeat_interleave(len(q) // len(rows), dim=0) for rows in (k, v))
    mask = causal_lower_right(q.shape[1], k.shape[1])
    return scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=grouped
    )[0]


def _require_finite(capture: LayerCapture) -> None:
    for name, array in (("queries", capture.q), ("keys and values", capture.kv)):
        if not torch.isfinite(array).all():
            raise CaptureError(
                f"layer {capture.layer_idx} produced NaN or infinity in its {name}; the model may be damaged or "
                "overflow in its dtype: check its weights, or build with --dtype float32"
            )
