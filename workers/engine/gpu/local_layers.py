"""Layers with a window, chunks or a state, beside those that are searched. All of their data is on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.attention.device import RowSource, row_sources
from csattn.batch import StepRows, make_device_selection
from csattn.models.recurrent_spec import RecurrentSpec
from csattn.models.spec import ModelSpec
from csattn.reach import Reach
from offload.staging import copy_to_device
from workers.engine.gpu.attend_chosen import plan_attention
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.sparse_or_full import full_attention_shape
from workers.model.attention import StepAttention
from workers.model.ops import RecurrentState


class LocalLayers(StepAttention):
    """Attention of all layers of a model: `inner` attends in those with an index, which it numbers separately.

    Owns, for the other layers, the last rows of every context and the requests' own rows, or the states of both.
    """

    def __init__(
        self,
        shape: EngineShape,  # of `inner`
        spec: ModelSpec,
        inner: StepAttention,
        sinks: Tensor | None,  # [all layers, num_q_heads] float32, on the device
        device: torch.device,
    ) -> None:
        self.inner, self.in_graph, self.lookahead = inner, inner.in_graph, inner.lookahead
        self._numbers = {layer_idx: number for number, layer_idx in enumerate(spec.indexed_layers)}
        recurrent = {i: layer.recurrent for i, layer in enumerate(spec.layers) if layer.recurrent is not None}
        others = [i for i, layer in enumerate(spec.layers) if layer.attention.reach is not None]
        self._versions = torch.zeros(shape.num_tails, dtype=torch.int64, device=device)  # all 0: one version
        self.states = [
            RecurrentState(*_state_buffers(recurrent[i], shape.num_tails, device), self._versions)
            if i in recurrent
            else None
            for i in range(spec.num_layers)
        ]
        self._begun = [_state_buffers(of, shape.num_contexts, device) for of in recurrent.values()]  # by contexts
        self._places = {
            layer_idx: _Place(shape, reach, device) for layer_idx, reach in zip(others, shape.local, strict=True)
        }
        kinds = {(x.reach, x.logit_cap) for x in (spec.layers[layer_idx].attention for layer_idx in others)}
        self._attend = {
            (reach, cap): plan_attention(_shape_of(shape, cap), device, reach=reach) for reach, cap in kinds
        }
        self._spec, self._sinks = spec, sinks
        self._nothing = {size: make_device_selection(size, shape.of_local[0], 1, device) for size in shape.batch_sizes}
        self.tails: Sequence[Tensor] = [
            self._places[i].tails if i in self._places else inner.tails[self._numbers.get(i, 0)]
            for i in range(spec.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of rows and states."""
        states = [part for state in self.states if state is not None for part in (state.conv, state.memory)]
        states += [part for begun in self._begun for part in begun]
        return sum(part.nbytes for part in states) + sum(place.nbytes for place in self._places.values())

    def load(self, context_id: int, kv: Sequence[Tensor], states: Sequence[Mapping[str, NDArray[np.float32]]]) -> None:
        """Load a context. kv: of layers with rows, [num_kv_heads, num_kept, 2, head_dim]; states: of the others."""
        for (conv, memory), state in zip(self._begun, states, strict=True):
            conv[context_id, 0].copy_(torch.tensor(state["conv"]))
            memory[context_id, 0].copy_(torch.tensor(state["memory"]))
        for place, rows in zip(self._places.values(), kv, strict=True):
            place.load(context_id, rows)

    def begin_request(self, tail_id: int, context_id: int) -> None:
        """Set a request's states to those after its context; context_id -1: to zeros. No step may be in flight."""
        states = [state for state in self.states if state is not None]
        for state, (conv, memory) in zip(states, self._begun, strict=True):
            state.conv[tail_id] = conv[context_id] if context_id >= 0 else 0.0
            state.memory[tail_id] = memory[context_id] if context_id >= 0 else 0.0

    def begin_step(self, rows: StepRows) -> None:
        self.inner.begin_step(rows)

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self.inner.look_ahead(self._numbers[layer_idx], q, rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if layer_idx in self._numbers:
            self.inner.attend(self._numbers[layer_idx], q, rows, out)
            return
        if layer_idx not in self._places:
            return
        spec, place = self._spec.layers[layer_idx].attention, self._places[layer_idx]
        attention, nothing = self._attend[spec.reach, spec.logit_cap][len(q)], self._nothing[len(q)]
        sinks = None if self._sinks is None else self._sinks[layer_idx]
        attention.attend(q, place.source, place.tails, place.source, nothing, rows, out, sinks=sinks)

    def end_step(self, rows: StepRows) -> None:
        self.inner.end_step(rows)


def _state_buffers(spec: RecurrentSpec, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the states of `num` requests or contexts: the convolution's last inputs, and the memory."""
    conv, memory = (torch.zeros((num, 1, *sizes), dtype=torch.float32, device=device) for sizes in spec.parts)
    return conv, memory


class _Place:
    """One layer's rows: contexts' last rows, and tails."""

    def __init__(self, shape: EngineShape, reach: Reach, device: torch.device) -> None:
        (num_kv_heads, head_dim), most = shape.of_local, min(reach.num_rows, shape.max_context_len)
        sizes = 1, shape.num_contexts, num_kv_heads * most, 2, head_dim
        self._rows = torch.zeros(sizes, dtype=shape.dtype, device=device)
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        self.source: RowSource = row_sources(self._rows, self._lens)[0]
        own = shape.num_tails, num_kv_heads, shape.tail_capacity, 2, head_dim
        self.tails = torch.zeros(own, dtype=shape.dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self.tails.nbytes

    def load(self, context_id: int, kv: Tensor) -> None:
        copy_to_device(kv, self._rows[0, context_id, : kv.shape[:2].numel()])
        self._lens[context_id] = kv.shape[1]


def _shape_of(shape: EngineShape, logit_cap: float | None) -> EngineShape:
    """Return the shape of attention in layers with rows but without an index."""
    heads, head_dim = shape.of_local
    plain = replace(shape, num_kv_heads=heads, head_dim=head_dim, logit_cap=logit_cap, max_segments=0, kv_format=None)
    return full_attention_shape(plain)
