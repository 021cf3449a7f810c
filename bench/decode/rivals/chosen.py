"""Steps whose rows a rival's selector chooses on the CPU, and which travel as ours do: PQCache and SparQ."""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.rivals.replays import Replays
from csattn.batch import StepRows
from workers.engine.batch_plan import plan_batch
from workers.engine.far_rows import FarRows
from workers.engine.resident import ResidentRows
from workers.engine.shape import EngineShape


class Chooser(Protocol):
    """Chooses for one row of a step in one layer, on the CPU."""

    has_rest: bool  # it also says what the rows that are left out are worth, and needs each new row for that

    def choose(
        self,
        layer_idx: int,
        row: int,
        context_id: int,
        q: NDArray[np.float32],  # [num_q_heads, head_dim]
        new_row: NDArray[np.uint16],  # bits of [num_kv_heads, 2, head_dim] bfloat16: the token's own
        tail_len: int,  # with the token's own
        kv_indices: NDArray[np.int32],  # [num_kv_heads, top_k], written
        valid_len: NDArray[np.int32],  # [num_kv_heads], written
    ) -> None: ...

    def rest(self, row: int) -> tuple[Tensor, Tensor]:
        """After `choose`: the mean value [num_kv_heads, head_dim], and its share [num_q_heads]."""
        ...


class ChosenSteps:
    """`StepAttention` on the host between graphs: queries go down, selections come up, missing rows follow."""

    lookahead = False
    in_graph = False

    def __init__(self, shape: EngineShape, far: FarRows, chooser: Chooser, device: torch.device) -> None:
        self.shape, self.far, self._chooser = shape, far, chooser
        self.tails = shape.make_tails(device)
        self._resident = ResidentRows(shape, device)
        (batch_size,) = shape.batch_sizes
        self._plan = plan_batch(shape, batch_size, device)
        on_gpu = device.type == "cuda"

        def mail(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch_size, *size, dtype=dtype, pin_memory=on_gpu)

        self._q = mail(shape.num_q_heads, shape.head_dim, dtype=torch.float32)
        self._new_rows = mail(shape.num_kv_heads, 2, shape.head_dim, dtype=shape.dtype)
        self._kv_indices = mail(shape.num_kv_heads, shape.max_top_k, dtype=torch.int32)
        self._valid_len = mail(shape.num_kv_heads, dtype=torch.int32)
        self._mean = mail(shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        self._share = mail(shape.num_q_heads, dtype=shape.dtype)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._replays = Replays(device)
        self._contexts: list[int] = []
        self._tail_lens: list[int] = []
        self.search_us: list[float] = []  # of each layer, for all rows of the step

    def load(self, context_id: int, kv: Sequence[Tensor]) -> None:
        """Give a place to a context whose rows `far` has."""
        self._resident.load(context_id, kv)

    def begin_step(self, rows: StepRows) -> None:
        self._contexts, self._tail_lens = torch.stack([rows.context_ids, rows.tail_lens]).tolist()

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None: ...

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if max(self._contexts) < 0:
            return
        key = layer_idx, q.data_ptr(), out.data_ptr()
        self._replays.run(("down", *key), lambda: self._send(layer_idx, q, rows))
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()
        started = time.perf_counter()
        for row, context_id in enumerate(self._contexts):
            if context_id >= 0:
                self._choose(layer_idx, row, context_id)
        self.search_us.append(1e6 * (time.perf_counter() - started))
        self._replays.run(("up", *key), lambda: self._attend(layer_idx, q, rows, out))

    def end_step(self, rows: StepRows) -> None: ...

    def _send(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._q.copy_(q.float(), non_blocking=True)
        if self._chooser.has_rest:
            last = (rows.tail_lens - 1).clamp_min(0).long()
            self._new_rows.copy_(self.tails[layer_idx][rows.tail_ids.long(), :, last], non_blocking=True)

    def _choose(self, layer_idx: int, row: int, context_id: int) -> None:
        new_row = self._new_rows[row].view(torch.uint16).numpy()
        kv_indices, valid_len = self._kv_indices[row].numpy(), self._valid_len[row].numpy()
        q, tail_len = self._q[row].numpy(), self._tail_lens[row]
        self._chooser.choose(layer_idx, row, context_id, q, new_row, tail_len, kv_indices, valid_len)
        if self._chooser.has_rest:
            mean, share = self._chooser.rest(row)
            self._mean[row].copy_(mean)
            self._share[row].copy_(share)

    def _attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        selection = self._plan.selection(layer_idx)
        selection.kv_indices.copy_(self._kv_indices, non_blocking=True)
        selection.valid_len.copy_(self._valid_len, non_blocking=True)
        fetched = self.far.fetch(layer_idx, selection, rows.context_ids)
        self._plan.attend(layer_idx, q, self._resident, self.tails, self.far, fetched, rows, out)
        if self._chooser.has_rest:
            device, grouped = out.device, out.view(len(out), self.shape.num_kv_heads, -1, self.shape.head_dim)
            share = self._share.to(device, non_blocking=True).view(*grouped.shape[:3], 1)
            grouped.lerp_(self._mean.to(device, non_blocking=True)[:, :, None], share)
