"""Attentions for whole steps: recorded queries in place of a model's, and the baselines as `StepAttention`."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.decode.baselines import Attention
from bench.decode.gpu_timing import capture
from bench.decode.widened import NUM_WIDE_LAYERS, Which
from bench.decode.workload import Workload
from csattn.attention.device import DeviceAttention, make_row_source
from csattn.batch import StepRows, make_device_selection
from workers.model import ModelRunner
from workers.model.attention import StepAttention

STEPS_BETWEEN_LAYERS = 61  # offset in the recorded steps between layers from the same wide layer


class RecordedQueries(StepAttention):
    """Passes every call on to an attention, with the recorded queries of the next step instead of those it gets.

    Random weights make meaningless queries, but which rows a step selects, and how many of them the last step selected
    too, must be realistic. The device counts the steps, in a call of the first layer: a captured graph goes through all
    recorded steps, and nothing is launched beside it.
    """

    def __init__(self, attention: StepAttention, work: Workload) -> None:
        self._inner = attention
        self.tails = attention.tails
        self.lookahead = attention.lookahead
        self.in_graph = attention.in_graph
        self._step = torch.zeros(1, dtype=torch.int64, device=work.device)
        self._own = self._recorded(work, "own")
        self._predicted = self._recorded(work, "predicted") if attention.lookahead else self._own
        self._own_now = self._own[:1].clone()
        self._predicted_now = self._predicted[:1].clone()
        self._looks_ahead_first = attention.lookahead and len(attention.tails) > 1

    def begin_step(self, rows: StepRows) -> None:
        self._inner.begin_step(rows)

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        if layer_idx == 1:
            self._advance()
        self._inner.look_ahead(layer_idx, self._predicted_now[0, layer_idx], rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if layer_idx == 0 and not self._looks_ahead_first:
            self._advance()
        self._inner.attend(layer_idx, self._own_now[0, layer_idx], rows, out)

    def end_step(self, rows: StepRows) -> None:
        self._inner.end_step(rows)

    def _advance(self) -> None:
        """Advance to the queries of the next step."""
        torch.index_select(self._own, 0, self._step, out=self._own_now)
        if self.lookahead:
            torch.index_select(self._predicted, 0, self._step, out=self._predicted_now)
        self._step.add_(1).remainder_(len(self._own))

    def _recorded(self, work: Workload, which: Which) -> Tensor:
        """Return all recorded queries: [num_steps, num_layers, batch_size, num_q_heads, head_dim]."""
        wide = [work.queries(layer_idx, which) for layer_idx in range(NUM_WIDE_LAYERS)]
        rounds = [divmod(layer_idx, NUM_WIDE_LAYERS) for layer_idx in range(len(self.tails))]
        layers = [wide[wide_idx].roll(-STEPS_BETWEEN_LAYERS * before, dims=0) for before, wide_idx in rounds]
        return torch.stack(layers, dim=1)


class FullAttentionSteps(StepAttention):
    """Full attention over contexts on the device. It does not read the tail, which is to its advantage."""

    def __init__(self, tails: Tensor, kv: list[tuple[Tensor, Tensor]], attend: Attention) -> None:
        """kv: for each layer, k and v [num_contexts, num_kv_heads, context_len, head_dim]."""
        self.tails = tails
        self._kv = kv
        self._attend = attend

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        k, v = self._kv[layer_idx]
        out.copy_(split_requests(self._attend(merge_requests(q, k), k, v), len(q), k))


class WindowSteps(StepAttention):
    """Attention to sinks, window and tail only."""

    def __init__(
        self, tails: Tensor, resident: list[list[Tensor]], batch_size: int, num_q_heads: int, softmax_scale: float
    ) -> None:
        """resident: for each layer and context [num_kv_heads, num_resident, 2, head_dim]."""
        num_kv_heads, tail_capacity, _, head_dim = tails.shape[2:]
        device = tails.device
        self.tails = tails
        self._resident_rows = resident
        self._resident = [make_row_source(rows, device) for rows in resident]
        self._nothing = make_device_selection(batch_size, num_kv_heads, 1, device)
        self._attention = DeviceAttention(
            batch_size=batch_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            num_index_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=tails.dtype,
            max_top_k=1,
            tail_capacity=tail_capacity,
            softmax_scale=softmax_scale,
            device=device,
        )

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        resident = self._resident[layer_idx]
        self._attention.attend(q, resident, self.tails[layer_idx], resident, self._nothing, rows, out)


def greedy_step(runner: ModelRunner, batch_size: int) -> Callable[[], None]:
    """Return a function that runs a step and then feeds each row its argmax token, at the next position and tail row.

    The host does not wait for the device.
    """
    rows, next_ids = runner.rows(batch_size), runner.step(batch_size).next_ids

    def advance() -> None:
        active = rows.tail_lens > 0
        rows.token_ids.copy_(next_ids.clamp(min=0))
        rows.positions.add_(active)
        rows.tail_lens.add_(active)

    replay_advance = capture([advance], warm_up=[lambda: None]).replay if next_ids.is_cuda else advance

    def step() -> None:
        runner.step(batch_size)
        replay_advance()

    return step


def merge_requests(q: Tensor, k: Tensor) -> Tensor:
    """Return queries as full attention takes them. If all requests share one context, they become heads of one request.

    q: [batch_size, num_q_heads, head_dim]; k: [num_contexts, num_kv_heads, ...].
    """
    if len(k) == len(q):
        return q[:, :, None]
    by_kv_head = q.view(len(q), k.shape[1], -1, q.shape[2]).transpose(0, 1)
    return by_kv_head.reshape(1, -1, 1, q.shape[2])


def split_requests(out: Tensor, batch_size: int, k: Tensor) -> Tensor:
    """Undo `merge_requests` for its output: [batch_size, num_q_heads, head_dim]."""
    if len(k) == batch_size:
        return out[:, :, 0]
    return out.view(k.shape[1], batch_size, -1, out.shape[3]).transpose(0, 1).reshape(batch_size, -1, out.shape[3])


def attention_only(attention: StepAttention, rows: StepRows, q: Tensor) -> Callable[[], None]:
    """Return a function that runs the attention of one step, all layers, without a model around it.

    q: [batch_size, num_q_heads, head_dim], passed to every layer; `RecordedQueries` replaces it.
    """
    num_layers = len(attention.tails)
    out = torch.empty_like(q)

    def attend_layers() -> None:
        for layer_idx in range(num_layers):
            if attention.lookahead and layer_idx + 1 < num_layers:
                attention.look_ahead(layer_idx + 1, q, rows)
            attention.attend(layer_idx, q, rows, out)

    def step(attend: Callable[[], None] = attend_layers) -> None:
        attention.begin_step(rows)
        attend()
        attention.end_step(rows)

    if not attention.in_graph:
        return step
    graph = capture([attend_layers], warm_up=[step])
    return lambda: step(graph.replay)
