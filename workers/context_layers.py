"""What selectors may read of a context: its rows, and on request what its own tokens attended to."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.models import LoadedModel
from csattn.models.attending_cache import AttendingCache
from csattn.models.attention_hook import attention_implementation
from csattn.selectors import ContextLayer

# tokens of the context that pass through the model at a time, and how many logits those may have in a layer
_CHUNK_LEN, _CHUNK_LOGITS = 128, 1 << 27


def context_layers(loaded: LoadedModel, artifact: Artifact) -> list[ContextLayer]:
    """Each layer of the artifact's context. The model runs over the context once a selector asks for its attention."""
    num_layers = loaded.geometry.num_layers
    received = cache(partial(attention_received, loaded, artifact))
    layers = []
    for layer_idx in range(num_layers):
        keys, values = artifact.layer_kv(layer_idx).unbind(2)
        of_layer = partial(_of_layer, received, layer_idx)
        layers.append(ContextLayer(keys, values, loaded.geometry.num_q_heads, of_layer))
    return layers


@torch.inference_mode()
def attention_received(loaded: LoadedModel, artifact: Artifact) -> list[Tensor]:
    """Per layer, each key's softmax weights in full causal attention, summed over the context's tokens.

    The context passes through the model again, against the artifact's rows: as long as a prefill takes.
    Returns [num_q_heads, context_len] float32 of each layer.
    """
    geometry, context_len = loaded.geometry, artifact.spec.context_len
    chunk_len = max(1, min(_CHUNK_LEN, _CHUNK_LOGITS // (geometry.num_q_heads * context_len)))
    ids = torch.from_numpy(np.array(artifact.token_ids)).long()[None]
    rows = [_Replayed(artifact.layer_kv(layer_idx), geometry.num_q_heads) for layer_idx in range(geometry.num_layers)]
    replayed = AttendingCache(rows)
    with attention_implementation(loaded.model):
        for chunk in torch.split(ids, chunk_len, dim=1):
            loaded.model.model(chunk, past_key_values=replayed)
    return [layer_rows.received for layer_rows in rows]


class _Replayed:
    """A layer's rows while the context passes through the model again: they are there already."""

    def __init__(self, kv: Tensor, num_q_heads: int):
        """kv: [num_kv_heads, context_len, 2, head_dim]."""
        self._kv = kv
        self.kv_len = 0
        self.received = torch.zeros(num_q_heads, kv.shape[1])

    def append(self, k: Tensor, v: Tensor) -> None:
        self.kv_len += k.shape[1]

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        num_tokens = q.shape[1]
        keys, values = self._kv[:, : self.kv_len].unbind(2)
        grouped = q.reshape(keys.shape[0], -1, q.shape[-1])
        logits = (grouped @ keys.transpose(1, 2)).view(*q.shape[:2], self.kv_len).float() * softmax_scale
        first = self.kv_len - num_tokens
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        logits[:, :, first:].masked_fill_(later, -torch.inf)
        weights = logits.softmax(-1)
        self.received[:, : self.kv_len] += weights.sum(1)
        return (weights.to(q.dtype).view(keys.shape[0], -1, self.kv_len) @ values).view_as(q)


def _of_layer(received: Callable[[], list[Tensor]], layer_idx: int) -> Tensor:
    return received()[layer_idx]
