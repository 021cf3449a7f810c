"""What selectors may read of a context: its rows and, on request, the attention of its own tokens."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.attention import attend_chunk
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.models.spec import AttentionSpec
from csattn.selectors import ContextLayer

# tokens of the context in one forward pass, and the most logits that these may have in a layer
_CHUNK_LEN, _CHUNK_LOGITS = 128, 1 << 27


def context_layers(loaded: LoadedModel, artifact: Artifact) -> list[ContextLayer]:
    """Return the layers of the artifact's context that have an index.

    The model runs over the context when a selector first reads the attention that keys have received.
    """
    received = cache(partial(attention_received, loaded, artifact))
    layers = []
    for layer_idx, kv in enumerate(artifact.indexed_kv()):
        keys, values = kv.unbind(2)
        of_layer = partial(_of_layer, received, layer_idx)
        layers.append(ContextLayer(keys, values, loaded.geometry.num_q_heads, of_layer))
    return layers


@torch.inference_mode()
def attention_received(loaded: LoadedModel, artifact: Artifact) -> list[Tensor]:
    """Return each key's softmax weights in full causal attention, summed over the context's tokens.

    The context passes through the model again, against the artifact's rows, which takes as long as a prefill.
    Returns [num_q_heads, context_len] float32 for each layer that sees the whole context.
    """
    # these import all of transformers, which takes seconds and which not every process needs
    from csattn.models.attending_cache import CACHE, AttendingCache
    from csattn.models.attention_hook import attention_implementation

    require_received(loaded)
    geometry, context_len = loaded.geometry, artifact.spec.context_len
    chunk_len = max(1, min(_CHUNK_LEN, _CHUNK_LOGITS // (geometry.num_q_heads * context_len)))
    ids = torch.from_numpy(np.array(artifact.token_ids)).long()[None]
    layers = zip(describe(loaded.model.config).layers, loaded.model.model.layers, strict=True)
    rows: list[_Replayed | _Passing] = []
    for layer_idx, (spec, layer) in enumerate(layers):
        sinks = getattr(layer.self_attn, "sinks", None)
        if spec.attention.reach is None:
            kv = artifact.layer_kv(layer_idx)
            rows.append(_Replayed(kv, geometry.num_q_heads, spec.attention.logit_cap, sinks))
        else:
            rows.append(_Passing(spec.attention, sinks))
    replayed = AttendingCache(rows)
    with attention_implementation(loaded.model):
        for chunk in torch.split(ids, chunk_len, dim=1):
            loaded.model.model(chunk, **{CACHE: replayed})
    return [layer_rows.received for layer_rows in rows if isinstance(layer_rows, _Replayed)]


def require_received(loaded: LoadedModel) -> None:
    """Raise ConfigError for a model that does not give the attention which the context's own tokens pay."""
    keeps_no_rows = not loaded.geometry.kinds.isdisjoint({"state", "nothing"})
    if keeps_no_rows or any(layer.rows_of is not None for layer in loaded.geometry.layers):
        why = "some of whose layers keep no rows" if keeps_no_rows else "some of whose layers share the rows of others"
        raise ConfigError(
            f"selector h2o needs the attention of the context's own tokens, which {loaded.name}, {why}, does not give; "
            "choose another selector"
        )


class _Replayed:
    """A layer whose rows are read from the artifact while the context passes through the model again."""

    def __init__(self, kv: Tensor, num_q_heads: int, cap: float | None = None, sinks: Tensor | None = None):
        """kv: [num_kv_heads, context_len, 2, head_dim]."""
        self._kv, self._cap, self._sinks = kv, cap, sinks
        self.kv_len = 0
        self.received = torch.zeros(num_q_heads, kv.shape[1], dtype=torch.float32)

    def append(self, k: Tensor, v: Tensor) -> None:
        self.kv_len += k.shape[1]

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        num_tokens = q.shape[1]
        keys, values = self._kv[:, : self.kv_len].unbind(2)
        # scaled before the product, which may exceed the largest float16
        grouped = (q * softmax_scale).reshape(keys.shape[0], -1, q.shape[-1])
        logits = (grouped @ keys.transpose(1, 2)).view(*q.shape[:2], self.kv_len).float()
        if self._cap is not None:
            logits = self._cap * (logits / self._cap).tanh()
        if self._sinks is not None:
            logits = torch.cat([logits, self._sinks.float().view(-1, 1, 1).expand(*q.shape[:2], 1)], dim=2)
        first = self.kv_len - num_tokens
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        logits[:, :, first : self.kv_len].masked_fill_(later, -torch.inf)
        weights = logits.softmax(-1)[:, :, : self.kv_len]
        self.received[:, : self.kv_len] += weights.sum(1)
        return (weights.to(q.dtype).view(keys.shape[0], -1, self.kv_len) @ values).view_as(q)


class _Passing:
    """A layer that sees only its last rows (a window or chunk), and keeps no others."""

    def __init__(self, spec: AttentionSpec, sinks: Tensor | None) -> None:
        self._spec, self._sinks = spec, sinks
        self._kept: Tensor | None = None  # [2, num_kv_heads, the last rows, head_dim]
        self.kv_len = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        reach, new = self._spec.reach, torch.stack([k, v])
        assert reach is not None
        self._kept = new if self._kept is None else torch.cat([self._kept[:, :, -reach.num_rows :], new], dim=2)
        self.kv_len += k.shape[1]

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        reach, kept = self._spec.reach, self._kept
        assert reach is not None and kept is not None
        first = self.kv_len - kept.shape[2]  # position of the first kept row
        tokens = range(self.kv_len - q.shape[1], self.kv_len)
        first_seen = torch.tensor([max(0, reach.first_seen(token) - first) for token in tokens])
        return attend_chunk(q, kept[0], kept[1], softmax_scale, first_seen, self._spec.logit_cap, self._sinks)


def _of_layer(received: Callable[[], list[Tensor]], layer_idx: int) -> Tensor:
    return received()[layer_idx]
