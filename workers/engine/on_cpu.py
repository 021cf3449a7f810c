"""Attention of a step's rows on the CPU: who attends to what, told to the kernels by addresses."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.attention import in_place, in_place_rest
from csattn.attention.in_place_arguments import ARGUMENTS, MAX_PARTS
from csattn.cpu.tape import Tape
from csattn.search.sketch import describe_sketch, query_bytes
from workers.engine.row_plan import KEPT, RowPlan
from workers.model.cpu.cpu_model import CpuModel
from workers.model.cpu.tape_ops import word

_BY_ROW = ("context_lens", "sink_ends", "window_starts", "num_index_heads", "top_ks")
_LAYOUT = ("row_bytes", "v_offsets", "k_readers", "v_readers")


class AttendOnCpu:
    """Owns what the attention kernels read besides the rows themselves, and a tape for each layer."""

    def __init__(self, model: CpuModel, softmax_scale: float) -> None:
        self._model, shape, max_rows = model, model.shape, model.max_rows
        self._scale = np.array([softmax_scale])
        places = 2 * max_rows  # of the rows, and of their own segments
        self._by_row = {name: np.zeros(places, np.int64) for name in (*_BY_ROW, *_LAYOUT)}
        self._kv = np.zeros((shape.num_layers, max_rows), np.int64)
        self._moments = np.zeros((shape.num_layers, max_rows), np.int64)
        self._chosen = np.zeros((shape.num_layers, 3, places), np.int64)  # addresses: kv_indices, valid_lens, rest
        self._sketches = np.zeros((shape.num_layers, places), np.int64)
        self._records: list[NDArray[Any]] = []  # that the sketches' addresses are of
        self._queries = np.zeros((places, shape.num_kv_heads, 0), np.uint8)
        sizes = max_rows, shape.num_q_heads, MAX_PARTS, shape.head_dim + 2
        self._parts = np.zeros(sizes, np.float32)
        self._arguments = [self._describe(layer_idx) for layer_idx in range(shape.num_layers)]
        self.layers = [self._tape(arguments) for arguments in self._arguments]
        self._pieces = (0, 0, 0, 0)

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
            [0 if alone else request.num_index_heads for request, alone in zip(requests, plan.alone, strict=True)],
            [request.top_k for request in requests],
            *zip(*(request.context.row_layout for request in requests), strict=True),
        )
        for place, of_rows in zip(self._by_row.values(), values, strict=True):
            place[: len(requests)] = of_rows
        self._set_sketches(plan)
        self._chosen[:] = 0
        for row, source in enumerate(plan.sources):
            num_places = self._model.shape.num_layers if source == KEPT else 2  # layers take them in turn
            for layer_idx in range(num_places):
                if (chosen := plan.selection(row, layer_idx)) is not None:
                    self._chosen[layer_idx::num_places, :2, row] = [word(part) for part in chosen]
        for row, own in enumerate(plan.owns):
            at = self._model.max_rows + row
            self._by_row["window_starts"][at] = own.num_rows if own is not None else 0
            self._by_row["top_ks"][at] = own.top_k if own is not None else 0
            if own is not None:
                number = row - own.rows.start
                parts: list[NDArray[Any]] = [own.out.kv_indices, own.out.valid_len]
                parts += [own.out.rest] if own.out.rest is not None else []
                self._chosen[:, : len(parts), at] = [word(part[number]) for part in parts]
        for group in plan.groups:
            for parity, selections in enumerate(group.selections):
                if selections.rest is not None:
                    for i, row in enumerate(range(group.rows.start, group.rows.stop)):
                        self._chosen[parity::2, 2, row] = word(selections.rest[i])

    def set_lens(self, plan: RowPlan, tail_lens: NDArray[np.int64]) -> None:
        """Cut the next step's work into pieces."""
        heads = int(self._by_row["num_index_heads"][: len(tail_lens)].max())
        lists = zip(plan.requests, tail_lens.tolist(), plan.owns, strict=True)
        ranges = max(
            in_place.num_ranges(request.longest_list + tail_len - (own.num_rows - own.top_k if own is not None else 0))
            for request, tail_len, own in lists
        )
        ends = [request.near[1] for row, request in enumerate(plan.requests) if _scores_anew(plan, row)]
        ends += [own.num_rows for own in plan.owns if own is not None and own.out.rest is None]
        rests = [in_place_rest.num_rest_ranges(end) for end in ends]
        rest_ranges = max(rests, default=0)
        if self._pieces == (len(tail_lens), heads, ranges, rest_ranges):
            return
        self._pieces = len(tail_lens), heads, ranges, rest_ranges
        sizes = {"max_index_heads": heads, "max_ranges": ranges, "max_rest_ranges": rest_ranges}
        num_rows, shape = len(tail_lens), self._model.shape
        of_rests = 2 * num_rows * shape.num_kv_heads
        pieces = of_rests * bool(rests), of_rests * rest_ranges, num_rows * heads * ranges, num_rows * shape.num_q_heads
        for arguments, tape in zip(self._arguments, self.layers, strict=True):
            for name, size in sizes.items():
                arguments[ARGUMENTS.index(name)] = size
            tape.pieces[:] = pieces

    def _set_sketches(self, plan: RowPlan) -> None:
        """Where the rows' sketches are, and room for what becomes of the rows' queries."""
        group_size = self._model.shape.num_q_heads // self._model.shape.num_kv_heads
        described: dict[int, NDArray[np.int64]] = {}
        self._sketches[:], self._records = 0, []
        most = 0
        read = {row: request.sketches for row, request in enumerate(plan.requests) if _scores_anew(plan, row)}
        for row, own in enumerate(plan.owns):
            if own is not None and own.out.rest is None and not plan.alone[row]:
                read[self._model.max_rows + row] = own.sketches
        for place, sketches in read.items():
            if id(sketches) not in described:
                records = [describe_sketch(sketch) for sketch in sketches]
                self._records += records
                described[id(sketches)] = np.array([record.ctypes.data for record in records], np.int64)
                most = max(most, *(query_bytes(sketch, group_size) for sketch in sketches))
            self._sketches[:, place] = described[id(sketches)]
        if most > self._queries.shape[2]:
            self._queries = np.zeros((*self._queries.shape[:2], most), np.uint8)
            for arguments in self._arguments:
                arguments[ARGUMENTS.index("queries")] = word(self._queries)
                arguments[ARGUMENTS.index("query_bytes")] = most

    def _describe(self, layer_idx: int) -> NDArray[np.int64]:
        model, shape, chosen = self._model, self._model.shape, self._chosen[layer_idx]
        values = {
            "num_rows": model.num_rows,
            "own_rows": model.max_rows,
            "q": model.q,
            "num_q_heads": shape.num_q_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "softmax_scale": self._scale,
            "kv": self._kv[layer_idx],
            "kv_indices": chosen[0],
            "valid_lens": chosen[1],
            "moments": self._moments[layer_idx],
            "sketches": self._sketches[layer_idx],
            "rests": chosen[2],
            "queries": 0,
            "query_bytes": 0,
            "max_rest_ranges": 0,
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
        return np.array([word(values[name]) for name in ARGUMENTS], np.int64)

    def _tape(self, arguments: NDArray[np.int64]) -> Tape:
        tape = Tape()
        tape.add(in_place_rest.rest_queries_stage, arguments)
        tape.add(in_place_rest.rest_stage, arguments)
        tape.add(in_place.attend_stage(self._model.kind), arguments, waits=False)
        tape.add(in_place.merge_stage, arguments)
        return tape


def _scores_anew(plan: RowPlan, row: int) -> bool:
    """Whether rows that are not selected are attended to here, by codes: no search does it on the way."""
    request = plan.requests[row]
    by_search = request.searches_attend and not plan.reuses(row)
    return bool(request.sketches) and not plan.alone[row] and not by_search
