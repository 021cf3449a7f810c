"""A model's step on the CPU as tapes, for any number of rows. Weights are read in the model's own memory."""

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
from csattn.models.latent_spec import CompressedSpec
from csattn.models.module_weights import weights_of
from csattn.models.query import Rotation
from csattn.models.recurrent_spec import RecurrentSpec
from csattn.models.spec import HeadsSpec, Temper
from csattn.models.weights import CompressedStepWeights, Frequencies
from offload.host_memory import sparse_zeros
from workers.model.attention import StepAttention
from workers.model.cpu.stage_recorder import RowTape
from workers.model.cpu.tape_ops import TapeOps
from workers.model.layers import StepLayers
from workers.model.ops import CompressedBuffers, LatentBuffers, RecurrentState

DTYPES = ("float32", "bfloat16", "float16")


class CpuModel:
    """Owns the rows of a step, its tensors and the requests' own KV. The model is not changed, and must be kept alive.

    A step is `begin`; then, for each layer, the caller's attention from `q` to `attended` and `after[layer_idx]`; then
    the `logits_tape` of the rows whose logits are needed. `begin` and `after` are keyed by `ahead`, whether queries are
    predicted. If so, `q_ahead[i % 2]` holds the predicted queries of indexed layer i once the tape after the layer two
    before it has run.
    """

    def __init__(self, model: Any, max_rows: int, num_tails: int, tail_capacity: int, num_threads: int = 1) -> None:
        self._weights = weights_of(model)
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        if self.dtype_name not in DTYPES or model.device.type != "cpu":
            raise ModelError(
                f"a step on the CPU needs weights in {', '.join(DTYPES)} on the CPU, got {model.dtype} on "
                f"{model.device}"
            )
        self.max_rows, self.spec = max_rows, self._weights.spec
        spec = self.spec
        self.num_rows, self.token_ids, self.tail_ids, self.tail_lens = (
            np.zeros(n, np.int64) for n in (1, *3 * [max_rows])
        )
        # addresses of each row's maps, which predict the layer's queries; 0: no prediction
        self.maps = np.zeros((spec.num_layers, max_rows), np.int64)
        # each layer's place among the indexed layers; None: it has no index
        indexed = spec.indexed_layers
        others = [i for i in range(spec.num_layers) if i not in indexed]
        self.indexed_idx = [indexed.index(i) if i in indexed else None for i in range(spec.num_layers)]
        sizes = num_tails, tail_capacity, model.dtype
        self.indexed_tails = _make_tails(len(indexed), spec.heads, *sizes)
        heads = spec.heads_of(others[0]) if others else spec.heads
        other_tails = _make_tails(len(others), heads, *sizes)
        # for each layer [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        of_layers = dict(zip([*indexed, *others], [*self.indexed_tails, *other_tails], strict=True))
        self.tails = [of_layers[layer_idx] for layer_idx in range(spec.num_layers)]
        # tails of the layers that attend to all rows: a request can continue from these alone
        self.whole_tails = self.indexed_tails if indexed else other_tails
        self.sinks = [layer.sinks for layer in self._weights.layers]
        self._ops = TapeOps(self.dtype_name, self.num_rows, spec.norm_eps, num_threads)
        # for each request, the version of its recurrent states that a step reads
        self._versions = np.zeros(num_tails, np.int64)
        self.states = [None if x.recurrent is None else _make_state(x.recurrent, self._versions) for x in spec.layers]
        cutter = _TapeCutter(self.tails, self.states, self._ops)
        token_ids, tail_ids, tail_lens = map(torch.from_numpy, (self.token_ids, self.tail_ids, self.tail_lens))
        rows = make_step_rows(max_rows, model.device)  # tapes do not read its positions and contexts
        rows = replace(rows, token_ids=token_ids, tail_ids=tail_ids, tail_lens=tail_lens)
        layers = StepLayers(self._weights, cutter, list(self.maps), self._ops, rows, torch.float32)
        self._rotations = layers.rotations
        # for each layer, the buffers that its attention reads and writes instead of q and attended; None: it uses those
        self.latents: list[LatentBuffers | None] = [layers.latents(layer_idx) for layer_idx in range(spec.num_layers)]
        self._compressed = [layers.compressed(layer_idx) for layer_idx in range(spec.num_layers)]
        # for each layer, q [max_rows, num_q_heads, head_dim] and attended [max_rows, q_width]
        head_buffers = [layers.heads(layer_idx) for layer_idx in range(spec.num_layers)]
        self.queries = [x.q.numpy() for x in head_buffers]
        self.outputs = [x.attended.flatten(1).numpy() for x in head_buffers]
        # the buffers that all indexed layers share
        first = indexed[0] if indexed else 0
        self.q, self.attended = self.queries[first], self.outputs[first]
        self.q_ahead, self.logits = tuple(q.numpy() for q in layers.q_ahead), layers.logits.numpy()
        self._last_hidden = layers.last_hidden.numpy()
        self.begin: dict[bool, Tape] = {}
        self.after: dict[bool, list[Tape]] = {}
        self._tapes: list[RowTape] = []
        for ahead in (False, True):
            cutter.tapes.clear()
            *to_last_layer, head, end = layers.calls(ahead)
            for call in to_last_layer:
                call.run()
            tapes = [*cutter.tapes, self._ops.cut()]
            self._tapes += tapes
            self.begin[ahead], *self.after[ahead] = (tape.tape for tape in tapes)
            head.run()
            end.run()
            self._head = cutter.tapes[-1]  # the same for both values of ahead
        self._num_taped = 0  # the number of rows that the tapes are set for

    @property
    def tapes(self) -> list[Tape]:
        """All tapes of a step."""
        return [tape.tape for tape in (*self._tapes, self._head)]

    def begin_request(self, request_slot: int, states: Sequence[Mapping[str, NDArray[np.float32]]]) -> None:
        """Start a request from its context's recurrent states, one for each layer that keeps a state."""
        self._versions[request_slot] = 0
        for place, of_context in zip([state for state in self.states if state is not None], states, strict=True):
            place.conv[request_slot, 0] = torch.tensor(of_context["conv"])
            place.memory[request_slot, 0] = torch.tensor(of_context["memory"])

    def compressed(self, layer_idx: int) -> tuple[CompressedSpec, CompressedBuffers, CompressedStepWeights]:
        """Return the spec, buffers and weights of a layer of compressed attention."""
        spec, buffers = self.spec.layers[layer_idx].compressed, self._compressed[layer_idx]
        weights = self._weights.layers[layer_idx].compressed
        assert spec is not None and buffers is not None and weights is not None
        return spec, buffers, weights

    def commit(self, request_slots: Collection[int]) -> None:
        """Make the recurrent states that the last step wrote for these requests the ones that the next step reads."""
        request_slots = list(set(request_slots))
        self._versions[request_slots] = 1 - self._versions[request_slots]

    def set_rows(self, token_ids: list[int], positions: list[int], tail_ids: list[int], tail_lens: list[int]) -> None:
        """Set the rows of the next step. tail_lens include the rows' own tokens."""
        self.num_rows[0] = num_rows = len(token_ids)
        for place, values in ((self.token_ids, token_ids), (self.tail_ids, tail_ids), (self.tail_lens, tail_lens)):
            place[:num_rows] = values
        for rope, frequencies, rotation in zip(self.spec.ropes, self._weights.ropes, self._rotations, strict=True):
            _compute_rotation(positions, frequencies, rope.temper, rotation)
        if num_rows != self._num_taped:
            self._num_taped = num_rows
            for tape in self._tapes:
                tape.set_rows(num_rows)

    def logits_tape(self, rows: Sequence[int]) -> Tape:
        """Return the tape that writes the logits of these rows, in this order, to the first rows of `logits`.

        Call it once a step, at its end: it overwrites the first rows' hidden states with those of `rows`.
        """
        self.num_rows[0] = num_rows = len(rows)
        self._last_hidden[:num_rows] = self._last_hidden[rows]
        self._head.set_rows(num_rows)
        return self._head.tape


def _compute_rotation(
    positions: list[int], frequencies: Frequencies, temper: Temper | None, rotation: Rotation
) -> None:
    """Write the rotation of the rows' positions, row by row, so that its bits do not depend on the rows beside it."""
    per_position, scale = frequencies.angles.numpy(), np.float32(frequencies.scale)
    cos, sin, q_scale = rotation.cos.numpy(), rotation.sin.numpy(), rotation.q_scale.numpy()
    for row, position in enumerate(positions):
        angles = np.float32(position) * per_position
        np.multiply(np.cos(angles), scale, out=cos[row])
        np.multiply(np.sin(angles), scale, out=sin[row])
        if temper is not None:
            q_scale[row] = temper.scales(torch.tensor(position))


def _make_tails(num_layers: int, heads: HeadsSpec, num_tails: int, tail_capacity: int, dtype: torch.dtype) -> Tensor:
    """Return [num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]; its pages take memory once written."""
    size = num_layers, num_tails, heads.num_kv_heads, tail_capacity, 2, heads.head_dim
    return torch.from_numpy(sparse_zeros(math.prod(size) * dtype.itemsize)).view(dtype).view(size)


def _make_state(spec: RecurrentSpec, versions: NDArray[np.int64]) -> RecurrentState:
    """Return a state of two versions. numpy's zeros take memory once they are written."""
    conv, memory = (np.zeros((len(versions), 2, *sizes), np.float32) for sizes in spec.parts)
    return RecurrentState(*map(torch.from_numpy, (conv, memory, versions)))


class _TapeCutter(StepAttention):
    """Stands in for attention while a step is recorded: where the step would attend, a tape ends."""

    lookahead = True

    def __init__(self, tails: list[Tensor], states: list[RecurrentState | None], ops: TapeOps) -> None:
        self.tails, self.states, self._ops = tails, states, ops
        self.tapes: list[RowTape] = []

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        pass

    def _cut(self, *args: Any, **kwargs: Any) -> None:
        self.tapes.append(self._ops.cut())

    attend = attend_latents = attend_compressed = end_step = _cut
