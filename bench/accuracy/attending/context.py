"""A real context's rows in every layer, and the model's predictions when its layers attend to them in another way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accuracy.attending.rotation import rotate_for
from csattn.artifact.layout import next_query_arrays, take_next_query
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE, AttendingCache
from csattn.models.attention_hook import attention_implementation
from csattn.models.query import queries_before_rope
from index_build.capture import prefill
from index_build.predictor import fit_predictor, sample_rows


@dataclass(frozen=True, slots=True)
class ContextLayer:
    """A layer's queries, keys and values of the context, after RoPE, and the predictor of its queries."""

    q: Tensor  # [num_kv_heads, group_size, context_len, head_dim] float32
    k: Tensor  # [num_kv_heads, context_len, head_dim] float32
    v: Tensor
    softmax_scale: float
    predictor: Tensor | None  # [num_q_heads, head_dim + 1, head_dim]: see `index_build.predictor`; None in layer 0

    @property
    def context_len(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class Step:
    """Queries, keys and values of the tokens after the context, in one layer."""

    q: Tensor  # [num_kv_heads, group_size, num_tokens, head_dim]
    early: Tensor  # like q, predicted from the input of the layer before; `q` itself where nothing is predicted
    k: Tensor  # [num_kv_heads, num_tokens, head_dim]
    v: Tensor


def split_heads(layer: ContextLayer) -> ContextLayer:
    """Return the layer with a copy of the KV head for every query head, for methods that choose rows per query head."""
    k, v = (rows.repeat_interleave(layer.q.shape[1], 0) for rows in (layer.k, layer.v))
    return replace(layer, q=layer.q.flatten(0, 1)[:, None], k=k, v=v)


def split_step(step: Step) -> Step:
    """Return the step for a layer made by `split_heads`."""
    k, v = (rows.repeat_interleave(step.q.shape[1], 0) for rows in (step.k, step.v))
    q, early = (of.flatten(0, 1)[:, None] for of in (step.q, step.early))
    return Step(q, q if step.early is step.q else early, k, v)


Attend = Callable[[int, Step], Tensor]  # layer_idx, step -> attention output, shaped like `Step.q`


@dataclass(frozen=True, slots=True)
class RealContext:
    """A context that was read with full attention, and the tokens that follow it."""

    loaded: LoadedModel
    layers: Sequence[ContextLayer]
    following: NDArray[np.int32]  # [num_tokens + 1]: each predicts the next; the last one is only a target
    log_probs: Tensor  # [num_tokens, vocab_size] float32: full attention's

    @property
    def context_len(self) -> int:
        return self.layers[0].context_len

    @torch.inference_mode()
    def predict(self, attend: Attend, ahead: bool = False) -> Tensor:
        """Return log-probabilities [num_tokens, vocab_size] when every layer attends by `attend`.

        All tokens run at once. ahead: queries for choosing rows are predicted from the input of the layer before.
        """
        loaded = self.loaded
        rows = [_Rows(layer_idx, self, attend) for layer_idx in range(len(self.layers))]
        ids = torch.from_numpy(self.following[:-1]).long()[None].to(loaded.device)
        with attention_implementation(loaded.model), _looking_ahead(self, rows if ahead else []):
            return loaded.model(ids, **{CACHE: AttendingCache(rows)}).logits[0].float().log_softmax(-1)

    def kl(self, log_probs: Tensor) -> Tensor:
        """Return each token's KL divergence from full attention's prediction, in nats [num_tokens]."""
        return (self.log_probs.exp() * (self.log_probs - log_probs)).sum(-1)

    def nll(self, log_probs: Tensor) -> float:
        """Return the mean negative log-likelihood of the following tokens, in nats per token."""
        targets = torch.from_numpy(self.following[1:]).long().to(log_probs.device)
        return -float(log_probs.gather(1, targets[:, None]).mean())


@torch.inference_mode()
def read_context(loaded: LoadedModel, context: NDArray[np.int32], following: NDArray[np.int32]) -> RealContext:
    """Run the model with full attention over context [context_len] and following [num_tokens + 1] token ids."""
    model, geometry = loaded.model, loaded.geometry
    rows, num_tokens = len(context), len(following) - 1
    body = model.model
    ids = torch.from_numpy(np.concatenate([context, following[:-1]])).long()
    layers: list[ContextLayer] = []
    predictor: Tensor | None = None
    hidden_out = torch.empty(0)
    for capture, hidden_out in prefill(model, ids):
        grouped = capture.q[:, :rows].float().unflatten(0, (geometry.num_kv_heads, -1))
        k, v = capture.kv[:, :rows].float().unbind(2)
        scale = body.layers[capture.layer_idx].self_attn.scaling
        layers.append(ContextLayer(grouped.clone(), k.clone(), v.clone(), scale, predictor))
        if capture.layer_idx + 1 < geometry.num_layers:
            sampled, samples = sample_rows(rows, geometry.head_dim), (capture.hidden_in, hidden_out)
            early, own = (queries_before_rope(model, capture.layer_idx + 1, h[:rows][sampled]) for h in samples)
            stored = take_next_query(next_query_arrays(fit_predictor(early, own).cpu().numpy()))
            assert stored is not None
            predictor = torch.from_numpy(stored).to(loaded.device)
    log_probs = model.lm_head(body.norm(hidden_out[-num_tokens:])).float().log_softmax(-1)
    return RealContext(loaded, layers, following, log_probs)


class _Rows:
    """A layer of the context and of the tokens that follow, with the interface of a transformers cache layer."""

    def __init__(self, layer_idx: int, context: RealContext, attend: Attend):
        self.layer_idx = layer_idx
        self.layer = context.layers[layer_idx]
        self.early: Tensor | None = None  # [num_q_heads, num_tokens, head_dim], set by the layer before
        self._attend = attend
        self._tail = torch.empty(0, 0, 0), torch.empty(0, 0, 0)

    @property
    def kv_len(self) -> int:
        return self.layer.context_len + self._tail[0].shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        self._tail = k.float(), v.float()

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        k, v = self._tail
        own = q.float().unflatten(0, (len(k), -1))
        early = own if self.early is None else self.early.float().unflatten(0, (len(k), -1))
        return self._attend(self.layer_idx, Step(own, early, k, v)).flatten(0, 1).to(q.dtype)


@contextmanager
def _looking_ahead(context: RealContext, rows: list[_Rows]) -> Iterator[None]:
    """Hook the model so that each layer's input predicts the next layer's queries; nothing if `rows` is empty."""
    hooks = []
    for following in rows[1:]:
        layers = context.loaded.model.model.layers
        hook = _PredictQueries(context.loaded.model, following)
        hooks.append(layers[following.layer_idx - 1].register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


class _PredictQueries:
    def __init__(self, model: Any, rows: _Rows):
        """rows: of the layer whose queries are predicted."""
        self._model = model
        self._rows = rows

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weights = self._rows.layer.predictor
        assert weights is not None, f"layer {self._rows.layer_idx} has no predictor"
        hidden = args[0] if args else kwargs["hidden_states"]
        early = queries_before_rope(self._model, self._rows.layer_idx, hidden[0])
        weights = weights.to(early.dtype)
        predicted, positions = early @ weights[:, :-1] + weights[:, -1:], kwargs["position_ids"][0]
        self._rows.early = rotate_for(self._model.model, self._rows.layer_idx, predicted, positions)
