"""The definition of a step: transformers' model, token by token, with float64 attention to the selected rows."""

from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE, AttendingCache
from csattn.models.attention_hook import attention_implementation
from csattn.models.query import queries_before_rope, rotate
from csattn.rest import moments_of
from csattn.rest.reference import estimate_rest
from csattn.search import empty_token_selections
from csattn.search.reference import search
from csattn.selection import Selection, join_choices
from csattn.selectors import ContextLayer, ContextView, prepare, resolve_rest, selector_for
from csattn.sketch import SketchIndex
from csattn.sketch.own import Growth, join_segments, make_segments
from csattn.sketch.reference import attend_rest
from csattn.table.tail import ListTail
from workers.context_layers import context_layers


def defined_logits(
    loaded: LoadedModel,
    artifact: Artifact,
    config: SearchConfig,
    selector: str,
    token_ids: list[int],
    growth: Growth | None = None,
) -> np.ndarray:
    """Return logits after each token, [num_tokens, vocab_size] float32. The tokens continue the artifact's context."""
    model = loaded.model
    layers = [
        DefinedLayer(artifact, layer_idx, layer, config, selector, growth or Growth())
        for layer_idx, layer in enumerate(context_layers(loaded, artifact))
    ]
    cache, logits = AttendingCache(layers), []
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(attention_implementation(model))
        if config.lookahead:
            for layer_idx in range(len(layers) - 1):
                stack.callback(predict_queries(model, artifact, layer_idx, layers[layer_idx + 1]).remove)
        for token_id in token_ids:
            logits.append(model(torch.tensor([[token_id]]), **{CACHE: cache}).logits[0, -1].float().numpy())
    return np.stack(logits)


def predict_queries(model, artifact: Artifact, layer_idx: int, of_next: "DefinedLayer"):
    """Register a hook on a layer that predicts the next layer's queries from its input. Returns the hook's handle."""
    weights = torch.tensor(artifact.layer_index(layer_idx).next_query, dtype=model.dtype)

    def hook(layer, args, kwargs) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        cos, sin = kwargs["position_embeddings"]
        early = queries_before_rope(model, layer_idx + 1, hidden[0])
        of_next.predicted = rotate(early @ weights[:, :-1] + weights[:, -1:], cos[0], sin[0])

    return model.model.layers[layer_idx].register_forward_pre_hook(hook, with_kwargs=True)


class DefinedLayer:
    """One request in one layer: implements `AttendingRows`, one token at a time."""

    predicted: Tensor | None = None  # [num_q_heads, 1, head_dim]: the query to select rows by if lookahead is on

    def __init__(
        self,
        artifact: Artifact,
        layer_idx: int,
        layer: ContextLayer,
        config: SearchConfig,
        selector: str,
        growth: Growth,
    ) -> None:
        self.growth, self.own, self.segments = growth, None, []
        self.sketch_config = artifact.spec.index_config
        self.context = torch.stack([layer.keys, layer.values], dim=2)
        self.tail = self.context[:, :0]
        self.view = ContextView(self.context.shape[1], layer.keys.shape[2] ** -0.5, config)
        self.selector = selector_for(selector, self.view)
        self.index = artifact.layer_index(layer_idx)
        self.rest = resolve_rest(config, self.selector, artifact.spec.index_config.layout)
        self.moments = moments_of([self.context[:, self.view.middle]]) if self.rest == "moments" else None
        chooses = self.selector not in ("csattn", "full", "window")
        self.other = prepare(self.selector, layer).selector(self.view) if chooses else None
        self.lists = ListTail(self.index) if not isinstance(self.index, SketchIndex) else None
        self.all_tail_stays = self.selector == "full" or (self.selector == "csattn" and self.lists is None)
        self.num_outside_window, self.last = 0, None

    @property
    def kv_len(self) -> int:
        return self.context.shape[1] + self.tail.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        self.tail = torch.cat([self.tail, torch.stack([k, v], dim=2)], dim=1)

    def attend(self, q: Tensor, softmax_scale: float) -> Tensor:
        token = self.tail.shape[1] - 1
        while not self.all_tail_stays and self.num_outside_window <= token - self.view.config.window_len:
            self.evict_from_window(*self.tail[:, self.num_outside_window].float().unbind(1))
        if self.last is None or token % self.view.config.search_period == 0:
            ahead = self.predicted is not None
            by = (self.predicted if ahead else q)[:, 0].float().contiguous().numpy()
            self.last = self.choose(by, self.tail[:, self.num_outside_window : token + 1 - ahead])
        chosen = self.last
        if self.rest == "sketch" and self.selector == "csattn":
            self.own, by = self.own_sketch(token + 1), self.predicted if self.predicted is not None else q
            if self.own is not None:
                chosen = join_choices(
                    chosen, self.choose_own(by[:, 0].float().contiguous().numpy()), self.view.context_len
                )
        return self.attend_to(q[:, 0].float().numpy(), chosen)[:, None].to(q.dtype)

    def own_sketch(self, tail_len: int) -> SketchIndex | None:
        """Return the sketch of the own segments that a token reads by their codes, or None if there are none yet.

        tail_len: the number of own rows that the token sees.
        """
        segment_len, near = self.growth.segment_len, max(self.growth.least_near, self.view.config.window_len)
        num_segments = max(0, tail_len - near) // segment_len
        if not num_segments:
            return None
        while len(self.segments) < num_segments:
            rows = self.tail[:, len(self.segments) * segment_len :][:, :segment_len]
            self.segments += make_segments(rows[None], self.sketch_config)
        return join_segments(self.segments[:num_segments])

    def choose_own(self, q: np.ndarray) -> Selection:
        """Select rows of the tail's segments."""
        num_rows = self.own.context_len
        top_k = min(num_rows, round(4 * self.view.config.keep * num_rows))
        out = empty_token_selections(1, self.own.num_heads, top_k)[0]
        search(q, self.own, None, top_k, 0, 0, self.view.softmax_scale, out)
        return out

    def evict_from_window(self, k: Tensor, v: Tensor) -> None:
        """Move the oldest row of the tail's window out of it, to the selector or the lists."""
        self.num_outside_window += 1
        if self.other is not None:
            self.other.append(k.numpy(), v.numpy())
        if self.lists is not None:
            self.lists.append(k.numpy())

    def choose(self, q: np.ndarray, recent: Tensor) -> Selection:
        view, num_heads = self.view, self.context.shape[0]
        if self.other is not None:
            return self.other.select(q, recent)
        if self.selector == "csattn":
            out, config = empty_token_selections(1, self.index.num_heads, view.top_k)[0], view.config
            lists = self.lists if self.num_outside_window else None
            search(q, self.index, lists, view.top_k, config.sink_len, config.window_len, view.softmax_scale, out)
            return out
        rows = range(*view.middle.indices(view.context_len)) if self.selector == "full" else range(0)
        return Selection(np.tile(np.array(rows, np.int32), (num_heads, 1)), np.full(num_heads, len(rows), np.int32))

    def attend_to(self, q: np.ndarray, chosen: Selection) -> Tensor:
        """Return [num_q_heads, head_dim]: one softmax over near and chosen rows, with each rest as one further row."""
        scale, middle = self.view.softmax_scale, self.view.middle
        kv = torch.cat([self.context, self.tail], dim=1).double().numpy()
        near = [*range(middle.start), *range(middle.stop, self.view.context_len)]
        num_coded = self.own.context_len if self.own is not None else self.num_outside_window
        near += range(self.view.context_len + num_coded, self.kv_len)
        rests = [self.attend_rest(q, chosen)]
        if self.own is not None:
            rests.append(self.attend_own_rest(q, chosen))
        outs = []
        for head, query in enumerate(q.astype(np.float64)):
            index_head = head * len(chosen.valid_len) // len(q)
            far = chosen.kv_indices[index_head, : chosen.valid_len[index_head]].tolist()
            rows = kv[head * len(kv) // len(q), [*near, *far]]
            logits = scale * rows[:, 0] @ query
            if chosen.log_weights is not None:
                logits[len(near) :] += chosen.log_weights[index_head, : len(far)]
            logits = np.append(logits, [lse[head] for _, lse in rests])
            values = np.vstack([rows[:, 1], *(out[head] for out, _ in rests)])
            weights = np.exp(logits - logits.max())
            outs.append(weights @ values / weights.sum())
        out = np.stack(outs)
        if chosen.rest is not None:
            out = (1 - chosen.rest.share[:, None]) * out + chosen.rest.share[:, None] * chosen.rest.out
        return torch.from_numpy(out).float()

    def attend_rest(self, q: np.ndarray, chosen: Selection) -> tuple[np.ndarray, np.ndarray]:
        """Attend to the rows that could have been chosen and were not; return out, like q, and lse [num_q_heads]."""
        scale, middle, (num_kv_heads, context_len) = self.view.softmax_scale, self.view.middle, self.context.shape[:2]
        if self.rest == "none":
            return np.zeros_like(q), np.full(len(q), -np.inf)
        if self.moments is not None:
            num_rows = np.array([middle.stop - middle.start + self.num_outside_window])
            out, lse = estimate_rest(q[None], self.moments, chosen.valid_len[None], num_rows, scale)
            return out[0], lse[0]
        is_rest = np.zeros((num_kv_heads, context_len), np.bool_)
        is_rest[:, middle] = True
        for head, valid in enumerate(chosen.valid_len):
            rows = chosen.kv_indices[head, :valid]
            is_rest[head, rows[rows < context_len]] = False
        return attend_rest(q, self.index, is_rest, scale)

    def attend_own_rest(self, q: np.ndarray, chosen: Selection) -> tuple[np.ndarray, np.ndarray]:
        """Attend to the rows of own segments that were not chosen; return out and lse as `attend_rest` does."""
        is_rest = np.ones((self.own.num_heads, self.own.context_len), np.bool_)
        for head, valid in enumerate(chosen.valid_len):
            rows = chosen.kv_indices[head, :valid] - self.view.context_len
            is_rest[head, rows[rows >= 0]] = False
        return attend_rest(q, self.own, is_rest, self.view.softmax_scale)
