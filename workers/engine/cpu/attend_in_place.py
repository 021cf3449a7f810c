"""Attention of a step's rows on the CPU: the addresses and lengths by which its kernels find what each row reads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.attention import in_place, in_place_rest
from csattn.attention.in_place_arguments import ARGUMENTS, MAX_PARTS
from csattn.cpu.addresses import KindStage
from csattn.cpu.arguments import word, words_of
from csattn.cpu.tape import Tape
from csattn.reach import Reach
from csattn.search.sketch import describe_sketch, query_bytes
from workers.engine.cpu.compressed_on_cpu import CompressedOnCpu
from workers.engine.cpu.latent_rows import LatentChoice, LatentRows
from workers.engine.cpu.row_plan import KEPT, RowPlan
from workers.model.cpu.cpu_model import CpuModel

_BY_ROW = ("context_lens", "sink_ends", "window_starts", "num_index_heads", "top_ks")
_LAYOUT = ("row_bytes", "v_offsets", "k_readers", "v_readers")


class AttendInPlace:
    """Owns the arguments of the attention kernels, and a tape for each layer."""

    def __init__(self, model: CpuModel, softmax_scale: float) -> None:
        self._model, spec, max_rows = model, model.spec, model.max_rows
        self._scale = np.array([softmax_scale])
        places = 2 * max_rows  # first the rows, then their own segments
        self._by_row = {name: np.zeros(places, np.int64) for name in (*_BY_ROW, *_LAYOUT)}
        self._num_indexed = len(spec.indexed_layers)
        self._kv = np.zeros((self._num_indexed, max_rows), np.int64)
        self._moments = np.zeros((self._num_indexed, max_rows), np.int64)
        self._chosen = np.zeros((self._num_indexed, 3, places), np.int64)  # addresses: kv_indices, valid_lens, rest
        self._sketches = np.zeros((self._num_indexed, places), np.int64)
        self._nothing = np.zeros(places, np.int64)
        self._caps = {cap: np.array([cap]) for cap in (layer.attention.logit_cap for layer in spec.layers) if cap}
        local_rows = [
            _LocalRows(layer_idx, layer.attention.reach, model)
            for layer_idx, layer in enumerate(spec.layers)
            if layer.attention.reach is not None and layer.recurrent is None
        ]
        latents = {i: layer.latent for i, layer in enumerate(spec.layers) if layer.latent is not None}
        choice = LatentChoice(max_rows, max((latent.top_k or 0 for latent in latents.values()), default=0))
        latent_rows = [LatentRows(layer_idx, latent, model, choice) for layer_idx, latent in latents.items()]
        # instead of tapes, if the model's layers are of compressed attention
        self.compressed = CompressedOnCpu(model) if spec.compressed else None
        # both kinds are given contexts and lengths in the same way; a model has one kind at most
        self._indexless: list[_LocalRows | LatentRows] = [*local_rows, *latent_rows]
        self._records: list[NDArray[Any]] = []  # kept alive: `_sketches` has their addresses
        self._queries = np.zeros((places, spec.num_kv_heads, 0), np.uint8)
        widest = max(spec.heads_of(layer_idx).head_dim for layer_idx in range(spec.num_layers))
        self._parts = np.zeros((max_rows, spec.num_q_heads, MAX_PARTS, widest + 2), np.float32)
        for local in local_rows:
            local.arguments = self._describe(local.layer_idx, local.of_rows)
            local.tape = self._tape(local.arguments)
        self._arguments = [
            self._describe(layer_idx, self._of_indexed(i)) for i, layer_idx in enumerate(spec.indexed_layers)
        ]
        self._tapes = [self._tape(arguments) for arguments in self._arguments]
        tapes = {of.layer_idx: of.tape for of in self._indexless}
        tapes |= dict(zip(spec.indexed_layers, self._tapes, strict=True))
        self.layers = [tapes.get(layer_idx) for layer_idx in range(spec.num_layers)]  # None: no tape
        self._pieces = (0, 0, 0, 0)

    def set_plan(self, plan: RowPlan) -> None:
        """Fill in what does not change while steps have this plan."""
        requests = plan.requests
        for row, request in enumerate(requests):
            self._kv[:, row] = request.context.kv_words
            self._moments[:, row] = [word(moments.table) for moments in request.moments] or 0
            self._model.maps[:, row] = request.context.map_words if request.looks_ahead else 0
        alone = zip(requests, plan.attends_per_row, strict=True)
        heads = [0 if attends_per_row else request.num_index_heads for request, attends_per_row in alone]
        values: dict[str, Any] = {
            "context_lens": plan.context_lens,
            "sink_ends": [request.near[0] for request in requests],
            "window_starts": [request.near[1] for request in requests],
            "num_index_heads": heads,
            "top_ks": [request.top_k for request in requests],
            **dict(zip(_LAYOUT, zip(*(request.context.row_layout for request in requests), strict=True), strict=True)),
        }
        for name, of_rows in values.items():
            self._by_row[name][: len(requests)] = of_rows
        for number, local in enumerate(self._indexless):
            local.set_contexts([request.context.local_kv[number] for request in requests])
        if self.compressed is not None:
            self.compressed.set_contexts([request.context.compressed for request in requests])
        self._set_sketches(plan)
        self._chosen[:] = 0
        for row, source in enumerate(plan.sources):
            num_places = self._num_indexed if source == KEPT else 2  # two, which layers use in turn
            for indexed_idx in range(num_places):
                if (chosen := plan.selection(row, indexed_idx)) is not None:
                    self._chosen[indexed_idx::num_places, :2, row] = [word(part) for part in chosen]
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
            for parity, search in enumerate(group.late):
                if search.out.rest is not None:
                    for i, row in enumerate(range(group.rows.start, group.rows.stop)):
                        self._chosen[parity::2, 2, row] = word(search.out.rest[i])

    def set_lens(self, plan: RowPlan, tail_lens: NDArray[np.int64]) -> None:
        """Set the lengths of the next step's rows, and divide its work into pieces."""
        for local in self._indexless:
            local.set_lens(plan.context_lens, tail_lens)
        if self.compressed is not None:
            self.compressed.set_lens(plan.request_slots, plan.context_lens, tail_lens)
        if not self._arguments:
            return
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
        num_rows, spec = len(tail_lens), self._model.spec
        of_rests = 2 * num_rows * spec.num_kv_heads
        pieces = of_rests * bool(rests), of_rests * rest_ranges, num_rows * heads * ranges, num_rows * spec.num_q_heads
        for arguments, tape in zip(self._arguments, self._tapes, strict=True):
            for name, size in sizes.items():
                arguments[ARGUMENTS.index(name)] = size
            tape.pieces[:] = pieces

    def _set_sketches(self, plan: RowPlan) -> None:
        """Fill in the addresses of the rows' sketches, and make room for the rows' transformed queries."""
        group_size = self._model.spec.num_q_heads // self._model.spec.num_kv_heads
        described: dict[int, NDArray[np.int64]] = {}
        self._sketches[:], self._records = 0, []
        most = 0
        read = {row: request.sketches for row, request in enumerate(plan.requests) if _scores_anew(plan, row)}
        for row, own in enumerate(plan.owns):
            if own is not None and own.out.rest is None and not plan.attends_per_row[row]:
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

    def _of_indexed(self, indexed_idx: int) -> dict[str, Any]:
        """Return the arguments of a layer with an index that are arrays by row."""
        kv_indices, valid_lens, rests = self._chosen[indexed_idx]
        return {
            "kv": self._kv[indexed_idx],
            "kv_indices": kv_indices,
            "valid_lens": valid_lens,
            "moments": self._moments[indexed_idx],
            "sketches": self._sketches[indexed_idx],
            "rests": rests,
            **self._by_row,
        }

    def _describe(self, layer_idx: int, of_rows: dict[str, Any]) -> NDArray[np.int64]:
        model, spec, cap = self._model, self._model.spec, self._model.spec.layers[layer_idx].attention.logit_cap
        heads = spec.heads_of(layer_idx)
        nothing = ("kv_indices", "valid_lens", "moments", "sketches", "rests")
        values = {
            "num_rows": model.num_rows,
            "own_rows": model.max_rows,
            "q": model.queries[layer_idx],
            "num_q_heads": heads.num_q_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "softmax_scale": self._scale,
            "logit_cap": self._caps[cap] if cap else 0,
            "sinks": model.sinks[layer_idx],
            "queries": 0,
            "query_bytes": 0,
            "max_rest_ranges": 0,
            "tails": model.tails[layer_idx],
            "tail_capacity": model.tails[layer_idx].shape[2],
            "tail_ids": model.tail_ids,
            "tail_lens": model.tail_lens,
            "max_index_heads": 0,
            "max_ranges": 0,
            "parts": self._parts,
            "out": model.outputs[layer_idx],
            **dict.fromkeys(nothing, self._nothing),
            **of_rows,
        }
        return words_of(ARGUMENTS, values)

    def _tape(self, arguments: NDArray[np.int64]) -> Tape:
        tape = Tape()
        tape.add(in_place_rest.rest_queries_stage, arguments)
        tape.add(in_place_rest.rest_stage, arguments)
        tape.add(KindStage(in_place.attend_stage, self._model.dtype_name), arguments, waits=False)
        tape.add(in_place.merge_stage, arguments)
        return tape


class _LocalRows:
    """What rows attend to in a layer with a window or chunks: the last rows of a context, then the request's own."""

    arguments: NDArray[np.int64]  # these two are made from `of_rows`
    tape: Tape

    def __init__(self, layer_idx: int, reach: Reach, model: CpuModel) -> None:
        self.layer_idx, self._reach, self._model = layer_idx, reach, model
        self._heads = model.spec.heads_of(layer_idx)
        # the second half is for own segments, which these layers do not have: there, window_starts is the first row
        # of the tail that is seen
        self.of_rows = {name: np.zeros(2 * model.max_rows, np.int64) for name in ("kv", *_BY_ROW, *_LAYOUT)}
        row = model.tails[layer_idx][0, 0, 0]
        self.of_rows["row_bytes"][:], self.of_rows["v_offsets"][:] = row.nbytes, row[0].nbytes
        self.of_rows["num_index_heads"][:] = self._heads.num_kv_heads

    def set_contexts(self, kv: list[Tensor]) -> None:
        """Set the contexts of the next steps' rows. kv: [num_kv_heads, num_kept, 2, head_dim] each."""
        self.of_rows["kv"][: len(kv)] = [word(rows) for rows in kv]
        self.of_rows["context_lens"][: len(kv)] = [rows.shape[1] for rows in kv]

    def set_lens(self, context_lens: NDArray[np.int64], tail_lens: NDArray[np.int64]) -> None:
        """Set what the next step's rows see. context_lens: of the whole contexts, not only of the kept rows."""
        num_rows, kept = len(tail_lens), self.of_rows["context_lens"][: len(tail_lens)]
        last = (context_lens + tail_lens - 1).tolist()
        first_seen = np.array([self._reach.first_seen(position) for position in last])
        starts = np.clip(first_seen - (context_lens - kept), 0, kept)
        tail_starts = np.maximum(0, first_seen - context_lens)
        self.of_rows["window_starts"][:num_rows] = starts
        self.of_rows["window_starts"][self._model.max_rows :][:num_rows] = tail_starts
        ranges = in_place.num_ranges(int((kept - starts + tail_lens - tail_starts).max()))
        heads = self._heads
        self.arguments[ARGUMENTS.index("max_index_heads")] = heads.num_kv_heads
        self.arguments[ARGUMENTS.index("max_ranges")] = ranges
        self.tape.pieces[:] = 0, 0, num_rows * heads.num_kv_heads * ranges, num_rows * heads.num_q_heads


def _scores_anew(plan: RowPlan, row: int) -> bool:
    """Whether attention to the rest by its codes runs here, because no search does it on the way."""
    request = plan.requests[row]
    by_search = request.searches_attend and plan.sources[row] == row
    return bool(request.sketches) and not plan.attends_per_row[row] and not by_search
