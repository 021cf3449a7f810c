"""A `StepEngine` in a hundred lines of numpy: full attention, row by row. Any engine must equal it at keep = 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName
from workers.serving.sampling import adjust_logits, draw, likelihood_of
from workers.serving.step_engine import NO_CONTEXT, DrawSpec, EngineCounts, Fidelity, Likelihood, StepResult, StepRow


@dataclass
class Slot:
    context_id: int
    config: SearchConfig
    selector: SelectorName
    rows: list[list[NDArray[np.float32]]] = field(default_factory=list)  # [num_layers][num_tokens]: [2, heads, dim]
    num_rows: int = 0


class FullEngine:
    """Computes rows one after another, so that no row of a step can affect another.

    The selector `window` attends only to sinks, window and own rows; all others attend to every row.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        max_rows: int = 16,
        max_requests: int = 16,
        tail_capacity: int = 256,
        draws: bool = False,
    ) -> None:
        self.draws, self.max_requests, self.tail_capacity = draws, max_requests, tail_capacity
        self.max_rows = self.alike_rows = max_rows
        geometry = loaded.geometry
        self.max_positions, self.num_layers = geometry.max_positions, geometry.num_layers
        self._geometry = geometry
        self._weights = {name: w.detach().float().numpy() for name, w in loaded.model.named_parameters()}
        self._eps = loaded.model.config.rms_norm_eps
        self._rope = loaded.model.model.rotary_emb.inv_freq.float().numpy()
        self.contexts: dict[int, list[NDArray[np.float32]]] = {}
        self.request_slots: dict[int, Slot] = {}
        self.num_steps = 0
        self.is_closed = False

    def add_context(self, context_id: int, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None) -> None:
        assert context_id not in self.contexts
        self.contexts[context_id] = [artifact.layer_kv(i).float().numpy() for i in range(self.num_layers)]

    def remove_context(self, context_id: int) -> None:
        assert not any(request_slot.context_id == context_id for request_slot in self.request_slots.values()), (
            "a slot is open on it"
        )
        del self.contexts[context_id]

    def preparation(self, context_id: int, config: SearchConfig, selector: SelectorName) -> Callable[[], None] | None:
        return None

    def open(self, request_slot: int, context_id: int, config: SearchConfig, selector: SelectorName) -> None:
        assert 0 <= request_slot < self.max_requests and request_slot not in self.request_slots
        assert context_id == NO_CONTEXT or context_id in self.contexts
        self.request_slots[request_slot] = Slot(context_id, config, selector, [[] for _ in range(self.num_layers)])

    def write_rows(self, request_slot: int, rows: torch.Tensor) -> None:
        for of_layer, mine in zip(rows.float().numpy(), self.request_slots[request_slot].rows, strict=True):
            mine += list(of_layer.transpose(1, 2, 0, 3).copy())
        self.request_slots[request_slot].num_rows += rows.shape[2]

    def read_rows(self, request_slot: int, start: int, stop: int) -> Callable[[], torch.Tensor]:
        rows = np.stack([np.stack(of_layer[start:stop], axis=2) for of_layer in self.request_slots[request_slot].rows])
        return lambda: torch.from_numpy(rows.transpose(0, 2, 3, 1, 4).copy())

    def close_request(self, request_slot: int) -> None:
        del self.request_slots[request_slot]

    def takes_drafts(self, artifact: Artifact | None, config: SearchConfig, selector: SelectorName) -> bool:
        return True

    def drop_rows(self, request_slot: int, num_rows: int) -> None:
        slot = self.request_slots[request_slot]
        slot.num_rows -= num_rows
        for of_layer in slot.rows:
            del of_layer[slot.num_rows :]

    def counts(self) -> EngineCounts:
        sizes = [sum(layer.nbytes for layer in layers) for layers in self.contexts.values()]
        return EngineCounts(kv_bytes=sum(sizes), search_s=0.001 * self.num_steps)

    def close(self) -> None:
        self.is_closed = True

    def step(
        self, rows: Sequence[StepRow], want_logits: bool = False, watch: tuple[int, int] | None = None
    ) -> StepResult:
        assert 0 < len(rows) <= self.max_rows
        self.num_steps += 1
        logits = np.stack([self._row(self.request_slots[row.request_slot], row.token_id) for row in rows])
        fidelity = None if watch is None else Fidelity(1.0, 1.0)
        drawn = [_drawn(of, row.draw) for of, row in zip(logits, rows, strict=True)]
        next_ids, likelihoods = np.array([token_id for token_id, _ in drawn]), [of for _, of in drawn]
        return StepResult(next_ids, logits if want_logits else None, fidelity, likelihoods if self.draws else ())

    def _row(self, request_slot: Slot, token_id: int) -> NDArray[np.float32]:
        weights, context = self._weights, self._context(request_slot)
        position = context[0].shape[1] + request_slot.num_rows
        assert position < self.max_positions and request_slot.num_rows < self.tail_capacity
        hidden = weights["model.embed_tokens.weight"][token_id]
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            normed = self._norm(hidden, f"{layer}.input_layernorm.weight")
            attended = self._attend(request_slot, i, normed, position)
            hidden = hidden + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
            normed = self._norm(hidden, f"{layer}.post_attention_layernorm.weight")
            gate = weights[f"{layer}.mlp.gate_proj.weight"] @ normed
            up = weights[f"{layer}.mlp.up_proj.weight"] @ normed
            hidden = hidden + weights[f"{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        request_slot.num_rows += 1
        logits: NDArray[np.float32] = self._weights["lm_head.weight"] @ self._norm(hidden, "model.norm.weight")
        return logits

    def _attend(self, request_slot: Slot, i: int, normed: NDArray[np.float32], position: int) -> NDArray[np.float32]:
        size, weights = self._geometry, self._weights
        q, k, v = (weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] @ normed for name in "qkv")
        q = self._rotate(q.reshape(size.num_q_heads, -1), position)
        k = self._rotate(k.reshape(size.num_kv_heads, -1), position)
        request_slot.rows[i].append(np.stack([k, v.reshape(size.num_kv_heads, -1)]))
        tail = np.stack(request_slot.rows[i], axis=2)  # [2, num_kv_heads, num_tokens, head_dim]
        context = self._context(request_slot)[i]
        if request_slot.selector == "window":
            sinks, window = request_slot.config.sink_len, request_slot.config.window_len
            context = np.concatenate([context[:, :sinks], context[:, sinks:][:, -window:]], axis=1)
        keys, values = (np.concatenate([context[:, :, part], tail[part]], axis=1) for part in (0, 1))
        grouped = q.reshape(size.num_kv_heads, -1, size.head_dim) * size.head_dim**-0.5
        scores = grouped @ keys.transpose(0, 2, 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out: NDArray[np.float32] = (shares / shares.sum(-1, keepdims=True) @ values).reshape(-1)
        return out

    def _context(self, request_slot: Slot) -> list[NDArray[np.float32]]:
        size = self._geometry
        none = np.zeros((size.num_kv_heads, 0, 2, size.head_dim), np.float32)
        return self.contexts.get(request_slot.context_id, [none] * self.num_layers)

    def _rotate(self, x: NDArray[np.float32], position: int) -> NDArray[np.float32]:
        angles = np.tile(np.float32(position) * self._rope, 2)
        first, second = np.split(x, 2, axis=-1)
        turned: NDArray[np.float32] = x * np.cos(angles) + np.concatenate([-second, first], axis=-1) * np.sin(angles)
        return turned

    def _norm(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        normed: NDArray[np.float32] = self._weights[name] * x / np.sqrt((x * x).mean() + np.float32(self._eps))
        return normed


def _drawn(logits: NDArray[np.float32], how: DrawSpec | None) -> tuple[int, Likelihood | None]:
    if how is None:
        return int(logits.argmax()), None
    token_id = draw(adjust_logits(logits, how), how)
    return token_id, None if how.num_top is None else likelihood_of(logits, token_id, how.num_top)
