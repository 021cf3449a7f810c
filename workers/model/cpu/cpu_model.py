"""A model's step on the CPU as tapes: weights are read where the model has them, rows are as many as come."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import StepRows, make_step_rows
from csattn.cpu.tape import Tape
from csattn.errors import ModelError
from csattn.models.latent import LatentQueries
from csattn.models.spec import CompressedSpec, DeltaSpec, HeadsSpec, Temper
from csattn.models.weights import CompressedStepWeights, Frequencies, weights_of
from offload.host_memory import sparse_zeros
from workers.model.attention import StepAttention
from workers.model.cpu.notes import RowTape
from workers.model.cpu.tape_ops import TapeOps
from workers.model.layers import StepLayers
from workers.model.ops import CompressedRoom, DeltaState, LatentRoom, Rotation

DTYPES = ("float32", "bfloat16", "float16")


class CpuModel:
    """Owns the rows of a step, its tensors and the requests' own KV. The model stays as it is, and must live.

    A step is `begin`, then per layer attention from `q` to `attended` (the caller's) and `after[layer_idx]`, then the
    `logits_tape` of the rows that are asked. With `ahead`, `q_ahead[number % 2]` holds the predicted queries of the
    layer of that number among those that have an index, once the layer two before it is done.
    """

    def __init__(self, model: Any, max_rows: int, num_tails: int, tail_capacity: int, num_threads: int = 1) -> None:
        self._weights = weights_of(model)
        self.kind = str(model.dtype).removeprefix("torch.")
        if self.kind not in DTYPES or model.device.type != "cpu":
            raise ModelError(
                f"a step on the CPU wants weights in {', '.join(DTYPES)} there, got {model.dtype} on {model.device}"
            )
        self.max_rows, self.shape = max_rows, self._weights.spec
        shape = self.shape
        self.num_rows, self.token_ids, self.tail_ids, self.tail_lens = (
            np.zeros(n, np.int64) for n in (1, *3 * [max_rows])
        )
        # addresses: what predicts the layer's queries, 0: none
        self.maps = np.zeros((shape.num_layers, max_rows), np.int64)
        # of each layer, its number among those that have an index; None: it has none
        indexed = shape.indexed_layers
        others = [i for i in range(shape.num_layers) if i not in indexed]
        self.numbers = [indexed.index(i) if i in indexed else None for i in range(shape.num_layers)]
        sizes = num_tails, tail_capacity, model.dtype
        self.indexed_tails = _make_tails(len(indexed), shape.heads, *sizes)  # of those
        heads = shape.heads_of(others[0]) if others else shape.heads
        other_tails = _make_tails(len(others), heads, *sizes)
        # of each layer [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        of_layers = dict(zip([*indexed, *others], [*self.indexed_tails, *other_tails], strict=True))
        self.tails = [of_layers[layer_idx] for layer_idx in range(shape.num_layers)]
        # rows that a request can go on from without others: of layers that attend to everything
        self.whole_tails = self.indexed_tails if indexed else other_tails
        self.sinks = [layer.sinks for layer in self._weights.layers]
        self._ops = TapeOps(self.kind, self.num_rows, num_threads)
        # of each request the version of its states that it reads, where it has any
        self._turns = np.zeros(num_tails, np.int64)
        self.states = [None if x.delta is None else _make_state(x.delta, self._turns) for x in shape.layers]
        between = _Cutting(self.tails, self.states, self._ops)
        token_ids, tail_ids, tail_lens = map(torch.from_numpy, (self.token_ids, self.tail_ids, self.tail_lens))
        rows = make_step_rows(max_rows, model.device)  # of which tapes read neither positions nor contexts
        rows = replace(rows, token_ids=token_ids, tail_ids=tail_ids, tail_lens=tail_lens)
        layers = StepLayers(self._weights, between, list(self.maps), self._ops, rows, torch.float32)
        self._rotations = layers.rotations
        # of each layer, what its attention reads and writes instead of q
        self.latents: list[LatentRoom | None] = [layers.latents(layer_idx) for layer_idx in range(shape.num_layers)]
        self._compressed = [layers.compressed(layer_idx) for layer_idx in range(shape.num_layers)]
        # of each layer [max_rows, num_q_heads, head_dim], and what it attends to, flat
        rooms = [layers.heads(layer_idx) for layer_idx in range(shape.num_layers)]
        self.queries, self.outputs = [x.q.numpy() for x in rooms], [x.attended.flatten(1).numpy() for x in rooms]
        # of those with an index, which share them
        first = indexed[0] if indexed else 0
        self.q, self.attended = self.queries[first], self.outputs[first]
        self.q_ahead, self.logits = tuple(q.numpy() for q in layers.q_ahead), layers.logits.numpy()
        self._last_hidden = layers.last_hidden.numpy()
        self.begin: dict[bool, Tape] = {}
        self.after: dict[bool, list[Tape]] = {}
        self._tapes: list[RowTape] = []
        for ahead in (False, True):
            between.tapes.clear()
            *to_last_layer, head, end = layers.calls(ahead)
            for call in to_last_layer:
                call.run()
            tapes = [*between.tapes, self._ops.cut()]
            self._tapes += tapes
            self.begin[ahead], *self.after[ahead] = (tape.tape for tape in tapes)
            head.run()
            end.run()
            self._head = between.tapes[-1]  # both times the same
        self._num_taped = 0  # rows that tapes are set for

    def begin_request(self, slot: int, states: Sequence[Mapping[str, NDArray[np.float32]]]) -> None:
        """states: of its context, for each layer that keeps one."""
        self._turns[slot] = 0
        for place, of_context in zip([state for state in self.states if state is not None], states, strict=True):
            place.conv[slot, 0] = torch.tensor(of_context["conv"])
            place.memory[slot, 0] = torch.tensor(of_context["memory"])

    def compressed(self, layer_idx: int) -> tuple[CompressedSpec, CompressedRoom, CompressedStepWeights]:
        """Of a layer of compressed attention, what it attends by."""
        spec, room = self.shape.layers[layer_idx].compressed, self._compressed[layer_idx]
        weights = self._weights.layers[layer_idx].compressed
        assert spec is not None and room is not None and weights is not None
        return spec, room, weights

    def commit(self, slots: Collection[int]) -> None:
        """What the step has made of these requests' states is what the next one reads."""
        slots = list(set(slots))
        self._turns[slots] = 1 - self._turns[slots]

    def set_rows(self, token_ids: list[int], positions: list[int], tail_ids: list[int], tail_lens: list[int]) -> None:
        """The rows of the next step; tail_lens with the rows' own tokens."""
        self.num_rows[0] = num_rows = len(token_ids)
        for place, values in ((self.token_ids, token_ids), (self.tail_ids, tail_ids), (self.tail_lens, tail_lens)):
            place[:num_rows] = values
        for rope, frequencies, rotation in zip(self.shape.ropes, self._weights.ropes, self._rotations, strict=True):
            _turn(positions, frequencies, rope.temper, rotation)
        if num_rows != self._num_taped:
            self._num_taped = num_rows
            for tape in self._tapes:
                tape.set_rows(num_rows)

    def logits_tape(self, rows: Sequence[int]) -> Tape:
        """Leaves the logits of these rows, in this order, as the first of `logits`. Asked for once a step, at its end:
        their hidden states take the first rows' places."""
        self.num_rows[0] = num_rows = len(rows)
        self._last_hidden[:num_rows] = self._last_hidden[rows]
        self._head.set_rows(num_rows)
        return self._head.tape


def _turn(positions: list[int], frequencies: Frequencies, temper: Temper | None, rotation: Rotation) -> None:
    """Row by row: the same bits whatever rows are beside it."""
    per_position, scale = frequencies.angles.numpy(), np.float32(frequencies.scale)
    cos, sin, q_scale = rotation.cos.numpy(), rotation.sin.numpy(), rotation.q_scale.numpy()
    for row, position in enumerate(positions):
        angles = np.float32(position) * per_position
        np.multiply(np.cos(angles), scale, out=cos[row])
        np.multiply(np.sin(angles), scale, out=sin[row])
        if temper is not None:
            q_scale[row] = temper.scales(torch.tensor(position))


def _make_tails(num_layers: int, heads: HeadsSpec, num_tails: int, tail_capacity: int, dtype: torch.dtype) -> Tensor:
    """[num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]: it costs memory once it is written."""
    size = num_layers, num_tails, heads.num_kv_heads, tail_capacity, 2, heads.head_dim
    return torch.from_numpy(sparse_zeros(math.prod(size) * dtype.itemsize)).view(dtype).view(size)


def _make_state(spec: DeltaSpec, turns: NDArray[np.int64]) -> DeltaState:
    """Numpy's zeros cost memory once they are written."""
    conv, memory = (np.zeros((len(turns), 2, *sizes), np.float32) for sizes in spec.parts)
    return DeltaState(*map(torch.from_numpy, (conv, memory, turns)))


class _Cutting(StepAttention):
    """For noting a step: where it would attend, a tape ends."""

    lookahead = True

    def __init__(self, tails: list[Tensor], states: list[DeltaState | None], ops: TapeOps) -> None:
        self.tails, self.states, self._ops = tails, states, ops
        self.tapes: list[RowTape] = []

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        pass

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self.tapes.append(self._ops.cut())

    def attend_latents(self, layer_idx: int, asked: LatentQueries, rows: StepRows, out: Tensor) -> None:
        self.tapes.append(self._ops.cut())

    def attend_compressed(self, layer_idx: int, room: CompressedRoom, rows: StepRows) -> None:
        self.tapes.append(self._ops.cut())

    def end_step(self, rows: StepRows) -> None:
        self.tapes.append(self._ops.cut())
