"""Runs the steps of a batch as CUDA graphs, without waiting for the device."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.errors import ConfigError, ContextError
from csattn.models.weights import ModelWeights
from workers.model.attention import StepAttention
from workers.model.devices import Devices
from workers.model.layers import Call, StepLayers
from workers.model.rows import RowBuffer, require_tokens
from workers.model.torch_ops import TorchOps

if TYPE_CHECKING:
    from workers.model.layers import StepOps


class StepOutput(NamedTuple):
    """The results of a step, on the device. The next step of the same batch size overwrites them."""

    logits: Tensor  # [batch_size, vocab_size] float32
    next_ids: Tensor  # [batch_size] int64: the argmax of each row's logits; -1 if the largest is NaN or infinity


class ModelRunner:
    """Runs steps of a few batch sizes. Work is enqueued on torch's current stream and never waited for.

        runner.fill(2, token_ids, positions, context_ids, tail_ids, tail_lens)
        next_ids = runner.step(2).next_ids

    The constructor runs one step of each batch size with idle rows, then captures it: the rows, attention and outputs
    of a batch size stay at fixed addresses. On a CPU, a step makes the same calls one by one.
    """

    def __init__(
        self,
        weights: ModelWeights,
        attention: StepAttention,
        batch_sizes: Sequence[int],
        next_query: Tensor | None = None,  # [num_contexts, indexed layers, num_q_heads, head_dim + 1, head_dim]
        use_graphs: bool = True,  # capture CUDA graphs on a GPU; False helps to debug
        grows: bool = False,  # rows may have own segments: steps in which no row has any are also captured
        may_read_all: bool = False,  # steps whose rows read all of their contexts are also captured
        devices: Devices | None = None,  # the devices that share the model, if the weights are this device's share
    ) -> None:
        """next_query: for each context and indexed layer, the maps that predict the queries of the next indexed layer;
        the last layer's maps are never read."""
        if not batch_sizes or min(batch_sizes) < 1:
            raise ConfigError(f"batch sizes must be positive and at least one, got {tuple(batch_sizes)}")
        if attention.lookahead and next_query is None:
            raise ConfigError("an attention that looks ahead needs next_query; pass the index's, or lookahead=False")
        self.weights, self.attention = weights, attention
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        if next_query is not None:
            next_query = next_query.to(device=weights.device, dtype=weights.dtype)
        ops = _ops_for(weights.device, self.batch_sizes[-1], weights.spec.norm_eps)
        kinds = [AS_THEY_COME, *[WITHOUT_OWN] * grows, *[READING_ALL] * may_read_all]
        with torch.no_grad():
            self._steps = {
                batch_size: _Step(weights, attention, next_query, ops, batch_size, kinds, devices)
                for batch_size in self.batch_sizes
            }
            if weights.device.type == "cuda" and use_graphs:
                pool = torch.cuda.graph_pool_handle()
                with _no_collection():
                    for step in reversed(self._steps.values()):  # the largest first: the others fit in its memory pool
                        step.capture(pool)

    def rows(self, batch_size: int) -> StepRows:
        """Return the rows of the next step of that batch size, on the device; they may be written there."""
        return self._steps[batch_size].buffer.rows

    def batch_size_for(self, num_rows: int) -> int:
        """Return the smallest batch size with room for `num_rows` rows. Raises ConfigError if they fit none."""
        for batch_size in self.batch_sizes:
            if batch_size >= num_rows:
                return batch_size
        raise ConfigError(f"{num_rows} rows do not fit a step of {self.batch_sizes[-1]}; make the runner with more")

    def fill(
        self,
        batch_size: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        context_ids: Sequence[int],
        tail_ids: Sequence[int],
        tail_lens: Sequence[int],  # the row's own token included
        top_ks: Sequence[int] | None = None,  # see `StepRows` for this and the next two
        own_lens: Sequence[int] | None = None,
        tail_starts: Sequence[int] | None = None,
        reads_all: bool = False,  # run the step captured with `may_read_all`; own segments are read like other rows
    ) -> None:
        """Set the rows of the next step with one copy to the device; the remaining rows are idle."""
        require_tokens(token_ids, self.weights.spec.vocab_size)
        step = self._steps[batch_size]
        starts = [0] * len(tail_lens) if tail_starts is None else tail_starts
        self._require_room(max((end - start for end, start in zip(tail_lens, starts, strict=True)), default=0))
        step.take(READING_ALL if reads_all else AS_THEY_COME if any(own_lens or ()) else WITHOUT_OWN)
        step.buffer.fill(
            token_ids=token_ids,
            positions=positions,
            context_ids=context_ids,
            tail_ids=tail_ids,
            tail_lens=tail_lens,
            top_ks=top_ks,
            own_lens=None if reads_all else own_lens,
            tail_starts=starts,
        )

    @torch.no_grad()
    def step(self, batch_size: int) -> StepOutput:
        """Enqueue one step on the rows as they are."""
        step = self._steps[batch_size]
        for piece in step.pieces[step.kind]:
            piece()
        return StepOutput(step.layers.logits, step.layers.next_ids)

    @torch.no_grad()
    def step_by_calls(self, batch_size: int, look: Callable[[int, Tensor], None] = lambda layer, q: None) -> StepOutput:
        """Enqueue the same step call by call instead of as captured: slower.

        look: called after each layer's attention, with its layer_idx and queries [batch_size, num_q_heads, head_dim].
        """
        step = self._steps[batch_size]
        for call in step.calls[step.kind]:
            call.run()
            if call.attends_in is not None:
                look(call.attends_in, step.layers.heads(call.attends_in).q)
        return StepOutput(step.layers.logits, step.layers.next_ids)

    def _require_room(self, tail_len: int) -> None:
        capacity = self.attention.tails[0].shape[2]
        if tail_len > capacity:
            raise ContextError(
                f"a tail of {tail_len} rows was requested, tails hold {capacity}; ask a shorter question, or make "
                "longer tails"
            )


class _Kind(NamedTuple):
    """The flags of `StepRows` for which a step is captured."""

    any_own: bool
    reads_all: bool


AS_THEY_COME, WITHOUT_OWN, READING_ALL = _Kind(True, False), _Kind(False, False), _Kind(False, True)


class _Step:
    """The rows and tensors of one batch size, and the calls that make up a step of each kind."""

    def __init__(
        self,
        weights: ModelWeights,
        attention: StepAttention,
        next_query: Tensor | None,
        ops: "StepOps",
        batch_size: int,
        kinds: Sequence[_Kind],
        devices: Devices | None,
    ) -> None:
        self.buffer = RowBuffer(batch_size, weights.device)
        maps: list[Tensor | None] = [None] * weights.spec.num_layers
        for number, layer_idx in enumerate(weights.spec.indexed_layers[1:] if next_query is not None else ()):
            assert next_query is not None
            maps[layer_idx] = next_query[:, number]
        self.layers = StepLayers(weights, attention, maps, ops, self.buffer.rows, weights.dtype, devices)
        of_kind = {kind: self.layers.with_rows(replace(self.buffer.rows, **kind._asdict())) for kind in kinds}
        self.calls = {kind: list(layers.calls(attention.lookahead)) for kind, layers in of_kind.items()}
        self.pieces: dict[_Kind, list[Callable[[], None]]] = {
            kind: [call.run for call in calls] for kind, calls in self.calls.items()
        }
        self.kind = AS_THEY_COME  # of the next step

    def take(self, kind: _Kind) -> None:
        """Set the kind of the next step; a kind that has no calls of its own runs as AS_THEY_COME."""
        assert kind in self.calls or not kind.reads_all, "steps that read all were not asked for"
        self.kind = kind if kind in self.calls else AS_THEY_COME

    def capture(self, pool: Any) -> None:
        """Capture the calls as CUDA graphs, one for each run of calls between those that run on the host."""
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for calls in self.calls.values():  # compiles the kernels; the rows are idle
                for call in calls:
                    call.run()
        torch.cuda.current_stream().wait_stream(side_stream)
        torch.cuda.synchronize()
        self.pieces = {kind: _pieces(calls, pool) for kind, calls in self.calls.items()}


def _pieces(calls: list[Call], pool: Any) -> list[Callable[[], None]]:
    """Capture each run of neighbouring device calls as one graph; calls on the host stay as they are."""
    pieces: list[Callable[[], None]] = []
    for on_host, run in groupby(calls, key=lambda call: call.on_host):
        together = [call.run for call in run]
        pieces += together if on_host else [_captured(together, pool)]
    return pieces


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage, then suspend collection: if it freed an older runner's graphs, the capture would fail."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _captured(calls: list[Callable[[], None]], pool: Any) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def _ops_for(device: torch.device, max_batch_size: int, eps: float) -> "StepOps":
    if device.type == "cpu":
        return TorchOps(eps)
    from workers.model.gpu.tiles import MAX_BATCH_SIZE
    from workers.model.gpu.triton_ops import TritonOps  # Triton may be missing on machines without a GPU

    if max_batch_size > MAX_BATCH_SIZE:
        raise ConfigError(f"a step has at most {MAX_BATCH_SIZE} rows, got a batch size of {max_batch_size}")
    return TritonOps(device, eps)
