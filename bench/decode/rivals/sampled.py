"""MagicPIG's step: near rows attended on the device, sampled ones on the CPU meanwhile, merged by their sums."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.rivals.kept_rows import KeptRows
from bench.decode.rivals.magicpig import SampledAttention
from bench.decode.rivals.replays import Replays
from csattn.batch import StepRows
from csattn.cpu.team import Team
from workers.engine.shape import EngineShape


@dataclass(frozen=True, slots=True)
class HashedLayer:
    """What the CPU has of one layer of a context."""

    kv: NDArray[np.uint16]  # bits of [num_kv_heads, context_len, 2, head_dim] bfloat16
    rows: NDArray[np.int32]  # see `PreparedMagicpig`
    starts: NDArray[np.int32]
    key_mean: NDArray[np.float32]  # [num_kv_heads, head_dim]
    norms: NDArray[np.float32]  # [num_kv_heads, context_len]: of the keys less their mean


class SampledSteps:
    """`StepAttention` on the host between graphs. The device hashes queries, as in the authors' code."""

    lookahead = False
    in_graph = False

    def __init__(
        self,
        shape: EngineShape,
        projections: Tensor,  # [head_dim, num_tables * num_bits] float32, on the device
        num_tables: int,
        middle: slice,
        num_resident: int,
        team: Team,
    ) -> None:
        device = projections.device
        self.tails = shape.make_tails(device)
        self._shape, self._team, self._projections = shape, team, projections
        (batch_size,) = shape.batch_sizes
        num_bits = projections.shape[1] // num_tables
        self._places = (2 ** torch.arange(num_bits, device=device)).float()
        size = shape.num_layers, shape.num_contexts, shape.num_kv_heads, num_resident, 2, shape.head_dim
        self.resident = torch.zeros(size, dtype=shape.dtype, device=device)
        self._near = KeptRows(
            batch_size, shape.num_q_heads, num_resident, self.tails, shape.softmax_scale, keeps_book=False
        )
        heads, on_gpu = (batch_size, shape.num_q_heads), device.type == "cuda"
        self._q = torch.zeros(*heads, shape.head_dim, dtype=torch.float32, pin_memory=on_gpu)
        self._codes = torch.zeros(*heads, num_tables, dtype=torch.int16, pin_memory=on_gpu)
        self._out = torch.zeros(*heads, shape.head_dim + 2, dtype=torch.float32, pin_memory=on_gpu)
        self._far = torch.zeros(*heads, shape.head_dim + 2, dtype=torch.float32, device=device)
        self._arrived = torch.cuda.Event() if on_gpu else None
        group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads, shape.head_dim
        self._search = SampledAttention(
            group, shape.max_context_len, middle, shape.softmax_scale, num_bits, num_tables, team.num_threads
        )
        self._layers: dict[int, list[HashedLayer]] = {}
        self._replays = Replays(device)
        self._contexts: list[int] = []
        self.num_sampled = 0
        self.search_us: list[float] = []  # of each layer, for all rows of the step

    def load(self, context_id: int, layers: Sequence[HashedLayer], resident: Sequence[Tensor]) -> None:
        """resident: of each layer [num_kv_heads, num_resident, 2, head_dim]."""
        self._layers[context_id] = list(layers)
        for place, rows in zip(self.resident[:, context_id], resident, strict=True):
            place.copy_(rows)

    def start_counting(self) -> None:
        self.num_sampled = 0
        self.search_us.clear()

    def begin_step(self, rows: StepRows) -> None:
        self._contexts = rows.context_ids.tolist()

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None: ...

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if max(self._contexts) < 0:
            return
        key = layer_idx, q.data_ptr(), out.data_ptr()
        resident = self.resident[layer_idx]
        self._replays.run(("down", *key), lambda: self._send(q))
        if self._arrived is not None:
            self._arrived.record()
        self._replays.run(("near", *key), lambda: self._near.attend(q, resident, self.tails[layer_idx], rows))
        if self._arrived is not None:
            self._arrived.synchronize()
        started = time.perf_counter()
        for row, context_id in enumerate(self._contexts):
            if context_id >= 0:
                self._attend_to_sampled(row, self._layers[context_id][layer_idx])
        self.search_us.append(1e6 * (time.perf_counter() - started))

        def merge() -> None:
            self._far.copy_(self._out, non_blocking=True)
            self._near.finish(resident, None, self._far, rows, out)

        self._replays.run(("up", *key), merge)

    def end_step(self, rows: StepRows) -> None: ...

    def _attend_to_sampled(self, row: int, layer: HashedLayer) -> None:
        told: Any = self._search.told
        told["q"], told["codes"], told["out"] = (x[row].numpy() for x in (self._q, self._codes, self._out))
        told["kv"], told["rows"], told["starts"] = layer.kv, layer.rows, layer.starts
        told["key_mean"], told["norms"] = layer.key_mean, layer.norms
        self._team.run(self._search.tape)
        self.num_sampled += int(told["num_sampled"].sum())

    def _send(self, q: Tensor) -> None:
        wide = q.float()
        signs = (wide @ self._projections > 0).view(*q.shape[:2], -1, len(self._places))
        self._q.copy_(wide, non_blocking=True)
        self._codes.copy_((signs.float() @ self._places).to(torch.int16), non_blocking=True)
