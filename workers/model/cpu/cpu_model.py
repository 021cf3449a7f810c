"""A model's step on the CPU as tapes: weights are read where the model has them, rows are as many as come."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import StepRows, make_step_rows
from csattn.cpu.tape import Tape
from csattn.errors import ModelError
from csattn.models.weights import weights_of
from workers.model.cpu.tape_ops import RowTape, TapeOps
from workers.model.layers import StepLayers

DTYPES = ("float32", "bfloat16", "float16")


class CpuModel:
    """Owns the rows of a step, its tensors and the requests' own KV. The model stays as it is, and must live.

    A step is `begin`, then per layer attention from `q` to `attended` (the caller's) and `after[layer_idx]`. The last
    of those leaves the logits. With `ahead`, `q_ahead[layer_idx % 2]` holds the predicted queries of layer_idx once the
    layer two before it is done.
    """

    def __init__(self, model: Any, max_rows: int, num_tails: int, tail_capacity: int) -> None:
        self._weights = weights_of(model)
        self.kind = str(model.dtype).removeprefix("torch.")
        if self.kind not in DTYPES or model.device.type != "cpu":
            raise ModelError(
                f"a step on the CPU wants weights in {', '.join(DTYPES)} there, got {model.dtype} on {model.device}"
            )
        self.max_rows, self.shape = max_rows, self._weights.spec
        shape = self.shape
        self._frequencies: NDArray[np.float32] = self._weights.inverse_frequencies.numpy()
        self.num_rows, self.token_ids, self.tail_ids, self.tail_lens = (
            np.zeros(n, np.int64) for n in (1, *3 * [max_rows])
        )
        # addresses: what predicts the layer's queries, 0: none
        self.maps = np.zeros((shape.num_layers, max_rows), np.int64)
        size = shape.num_layers, num_tails, shape.num_kv_heads, tail_capacity, 2, shape.head_dim
        # numpy's zeros cost memory once they are written, torch's at once
        tails = np.zeros(size, np.float32 if model.dtype.itemsize == 4 else np.int16)
        self.tails = torch.from_numpy(tails).view(model.dtype)
        self._ops = TapeOps(self.kind, self.num_rows)
        between = _Cutting(self.tails, self._ops)
        token_ids, tail_ids, tail_lens = map(torch.from_numpy, (self.token_ids, self.tail_ids, self.tail_lens))
        rows = make_step_rows(max_rows, model.device)  # of which tapes read neither positions nor contexts
        rows = replace(rows, token_ids=token_ids, tail_ids=tail_ids, tail_lens=tail_lens)
        layers = StepLayers(self._weights, between, list(self.maps), self._ops, rows, torch.float32)
        self._cos, self._sin = layers.rotation.cos.numpy(), layers.rotation.sin.numpy()
        self.q, self.q_ahead = layers.q.numpy(), tuple(q.numpy() for q in layers.q_ahead)
        self.attended, self.logits = layers.attended.flatten(1).numpy(), layers.logits.numpy()
        self.begin: dict[bool, Tape] = {}
        self.after: dict[bool, list[Tape]] = {}
        self._tapes: list[RowTape] = []
        for ahead in (False, True):
            between.tapes.clear()
            for call in layers.calls(ahead):
                call.run()
            self._tapes += between.tapes
            self.begin[ahead], *self.after[ahead] = (tape.tape for tape in between.tapes)

    def set_rows(self, token_ids: list[int], positions: list[int], tail_ids: list[int], tail_lens: list[int]) -> None:
        """The rows of the next step; tail_lens with the rows' own tokens."""
        num_rows, rope_scale = len(token_ids), np.float32(self._weights.rope_scale)
        for place, values in ((self.token_ids, token_ids), (self.tail_ids, tail_ids), (self.tail_lens, tail_lens)):
            place[:num_rows] = values
        for row, position in enumerate(positions):  # one by one: the same bits whatever rows are beside it
            angles = np.float32(position) * self._frequencies
            np.multiply(np.cos(angles), rope_scale, out=self._cos[row])
            np.multiply(np.sin(angles), rope_scale, out=self._sin[row])
        if num_rows != self.num_rows[0]:
            self.num_rows[0] = num_rows
            for tape in self._tapes:
                tape.set_rows(num_rows)


class _Cutting:
    """A `StepAttention` for noting a step: where it would attend, a tape ends."""

    lookahead = True
    in_graph = True

    def __init__(self, tails: Tensor, ops: TapeOps) -> None:
        self.tails, self._ops = tails, ops
        self.tapes: list[RowTape] = []

    def begin_step(self, rows: StepRows) -> None:
        pass

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        pass

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self.tapes.append(self._ops.cut())

    def end_step(self, rows: StepRows) -> None:
        self.tapes.append(self._ops.cut())
