"""Attention of a step's rows on the CPU: who attends to what, told to the kernels by addresses."""

import numpy as np
from numpy.typing import NDArray

from csattn.attention import in_place
from csattn.cpu.tape import Tape
from workers.cpu_model.model import CpuModel, word
from workers.engine.row_plan import RowPlan

_BY_ROW = ("context_lens", "sink_ends", "window_starts", "num_index_heads", "top_ks")
_LAYOUT = ("row_bytes", "v_offsets", "k_readers", "v_readers")


class AttendOnCpu:
    """Owns what the attention kernels read besides the rows themselves, and a tape for each layer."""

    def __init__(self, model: CpuModel, softmax_scale: float) -> None:
        self._model, shape, max_rows = model, model.shape, model.max_rows
        self._scale = np.array([softmax_scale])
        self._by_row = {name: np.zeros(max_rows, np.int64) for name in (*_BY_ROW, *_LAYOUT)}
        self._kv = np.zeros((shape.num_layers, max_rows), np.int64)
        self._moments = np.zeros((shape.num_layers, max_rows), np.int64)
        self._chosen = np.zeros((2, 2, max_rows), np.int64)  # addresses: kv_indices and valid_lens; by layer in turn
        sizes = max_rows, shape.num_q_heads, in_place.MAX_RANGES, shape.head_dim + 2
        self._parts = np.zeros(sizes, np.float32)
        self._arguments = [self._describe(layer_idx) for layer_idx in range(shape.num_layers)]
        self.layers = [self._tape(arguments) for arguments in self._arguments]
        self._pieces = (0, 0, 0)

    def set_plan(self, plan: RowPlan) -> None:
        """Take over what holds as long as the same slots are in the step."""
        requests = plan.requests
        for row, request in enumerate(requests):
            self._kv[:, row] = request.context.kv_words
            self._moments[:, row] = [word(moments.table) for moments in request.moments] or 0
            self._model.maps[:, row] = request.context.map_words if request.looks_ahead else 0
        values = (
            [request.view.context_len for request in requests],
            [request.near[0] for request in requests],
            [request.near[1] for request in requests],
            [request.num_index_heads for request in requests],
            [request.top_k for request in requests],
            *zip(*(request.context.row_layout for request in requests), strict=True),
        )
        for place, of_rows in zip(self._by_row.values(), values, strict=True):
            place[: len(requests)] = of_rows
        self._chosen[:] = 0
        for group in plan.groups:
            for parity, selections in enumerate(group.selections):
                for row, kv_indices, valid_len in zip(
                    range(group.rows.start, group.rows.stop), selections.kv_indices, selections.valid_len, strict=True
                ):
                    self._chosen[parity, :, row] = word(kv_indices), word(valid_len)

    def set_lens(self, plan: RowPlan, tail_lens: NDArray[np.int64]) -> None:
        """Cut the next step's work into pieces."""
        heads = max(request.num_index_heads for request in plan.requests)
        lists = zip(plan.requests, tail_lens.tolist(), strict=True)
        ranges = max(in_place.num_ranges(request.longest_list + tail_len) for request, tail_len in lists)
        if self._pieces == (len(tail_lens), heads, ranges):
            return
        self._pieces = len(tail_lens), heads, ranges
        where = in_place.ARGUMENTS.index("max_index_heads"), in_place.ARGUMENTS.index("max_ranges")
        pieces = len(tail_lens) * heads * ranges, len(tail_lens) * self._model.shape.num_q_heads
        for arguments, tape in zip(self._arguments, self.layers, strict=True):
            arguments[list(where)] = heads, ranges
            tape.pieces[:] = pieces

    def _describe(self, layer_idx: int) -> NDArray[np.int64]:
        model, shape, chosen = self._model, self._model.shape, self._chosen[layer_idx % 2]
        values = {
            "num_rows": model.num_rows,
            "q": model.q,
            "num_q_heads": shape.num_q_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "softmax_scale": self._scale,
            "kv": self._kv[layer_idx],
            "kv_indices": chosen[0],
            "valid_lens": chosen[1],
            "moments": self._moments[layer_idx],
            "tails": model.tails[layer_idx],
            "tail_capacity": model.tails.shape[3],
            "tail_ids": model.tail_ids,
            "tail_lens": model.tail_lens,
            "max_index_heads": 0,
            "max_ranges": 0,
            "parts": self._parts,
            "out": model.attended,
            **self._by_row,
        }
        return np.array([word(values[name]) for name in in_place.ARGUMENTS], np.int64)

    def _tape(self, arguments: NDArray[np.int64]) -> Tape:
        tape = Tape()
        tape.add(in_place.attend_stage(self._model.kind), arguments)
        tape.add(in_place.merge_stage, arguments)
        return tape
