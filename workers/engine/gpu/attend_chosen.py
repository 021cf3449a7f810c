"""Attention of whole steps on a GPU to selected rows, wherever they are searched for."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from csattn.attention.device import DeviceAttention, RowSource, row_sources
from csattn.batch import DeviceSelection, StepRows, make_device_selection
from csattn.reach import Reach
from csattn.rest import moments_of
from csattn.rest.device import DeviceMoments, moment_table, moments_shape
from csattn.search.device import DeviceIndexes, DeviceLayerIndex, SketchPass, SketchShape
from workers.engine.gpu.far_rows import FarRows
from workers.engine.gpu.schedule import Schedule
from workers.engine.gpu.shape import EngineShape
from workers.model.attention import StepAttention

if TYPE_CHECKING:
    from workers.engine.gpu.own_on_device import OwnOnDevice  # which has an `AttendChosen` itself

_PIECE_ROWS = 8192  # that are copied to the device at a time


class AttendChosen(StepAttention):
    """Owns all tails, the contexts' resident rows, and their indexes, if these are on the device.

    Each batch size has its kernels and two selections (double buffering: one is read while the other is made).
    """

    reads_index = True  # whether kernels read the contexts' indexes

    def __init__(
        self,
        shape: EngineShape,
        far: FarRows,
        device: torch.device,
        tails: Tensor | None,  # as from `make_tails`; None: makes its own
        own: "OwnOnDevice | None",  # attends to requests' own segments, on another stream
        sinks: Tensor | None,  # [num_layers, num_q_heads] float32: sink logits, if the shape has them
        copies_beside: bool = False,  # whether `far` copies rows on another stream
    ) -> None:
        self.shape, self.far, self.own = shape, far, own
        self.lookahead = bool(shape.search.lookahead)
        self.tails: Tensor = shape.make_tails(device) if tails is None else tails
        self._resident, self._sinks = ResidentRows(shape, device), sinks
        self._attention = plan_attention(shape, device, copies_beside)
        sizes = shape.num_index_heads, shape.max_top_k, device
        self._selections = {
            batch_size: [make_device_selection(batch_size, *sizes) for _ in range(2)]
            for batch_size in shape.batch_sizes
        }
        self._schedule = Schedule(shape, device)
        self.indexes = DeviceIndexes(shape.num_layers, shape.num_contexts, shape.search, device, shape.max_segments)
        self._passes: dict[int, SketchPass] = {}  # over the codes, by batch size; empty: the rest has no codes

    def load(
        self,
        context_id: int,
        kv: Sequence[Tensor],  # as `far` has it, wherever it lies; its resident rows are copied
        index: Iterable[DeviceLayerIndex],  # of each layer; taken only if a kernel reads it
        plain: Sequence[Tensor] | None = None,  # if kv is coded: the rows as built
    ) -> None:
        """Load a context whose rows `far` has. No step may be in flight."""
        context_len = self.shape.require_context(kv)
        self._resident.load(context_id, kv, plain)
        if self.reads_index:
            self.indexes.load(context_id, context_len, list(index))

    def unload(self, context_id: int) -> None:
        """Forget a context. No step may be in flight."""
        self.indexes.unload(context_id)

    def close(self) -> None:
        """Free what is not on the device. No step may be in flight, or follow."""

    def chosen(self, layer_idx: int, rows: StepRows) -> DeviceSelection:
        """Return what the step has selected in that layer; valid until layer_idx + 2 is searched."""
        return self._selections[rows.batch_size][layer_idx % 2]

    def begin_step(self, rows: StepRows) -> None:
        self._schedule.begin_step(rows)
        if (own := self._own(rows)) is not None:
            own.begin_step(rows)

    def _own(self, rows: StepRows) -> "OwnOnDevice | None":
        return self.own if rows.any_own else None

    def _post_rest(self, layer_idx: int, rows: StepRows) -> None:
        """Enqueue the kernels that subtract the selected rows from a pass's sums and post the rest to attention, which
        follows. Does nothing if there are no passes."""
        if self._passes:
            attention, selected = self._attention[rows.batch_size], self.chosen(layer_idx, rows)
            posted = attention.posted, attention.rest_parts
            self._passes[rows.batch_size].attend_rest(self.indexes, layer_idx, rows.context_ids, selected, *posted)

    def _attend(
        self,
        layer_idx: int,
        q: Tensor,
        fetched: DeviceSelection,  # as `far.fetch` has returned it for that layer
        rows: StepRows,
        out: Tensor,
    ) -> None:
        """Enqueue one layer's attention to resident rows, tails and fetched rows, and merge it with attention to own
        segments, which must have been enqueued and goes on meanwhile."""
        near, source, spill = self._resident.source(layer_idx), self.far.source(layer_idx), self.far.spill(layer_idx)
        moments, sinks = self._resident.moments(layer_idx), None if self._sinks is None else self._sinks[layer_idx]
        attention = self._attention[rows.batch_size]
        attention.attend(q, near, self.tails[layer_idx], source, fetched, rows, out, spill, moments, sinks)
        if (own := self._own(rows)) is not None:
            attention.merge(out, *own.attended(rows), rows)


def plan_attention(
    shape: EngineShape, device: torch.device, copies_beside: bool = False, reach: Reach | None = None
) -> dict[int, DeviceAttention]:
    """Make the attention kernels of each batch size, with their workspace."""
    return {
        batch_size: DeviceAttention(
            batch_size=batch_size,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            num_index_heads=shape.num_index_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            max_top_k=shape.max_top_k,
            tail_capacity=shape.tail_capacity,
            softmax_scale=shape.softmax_scale,
            device=device,
            rest=shape.rest,
            max_segments=shape.max_segments,
            coding=shape.coding,
            reach=reach,
            logit_cap=shape.logit_cap,
            has_sinks=shape.has_sinks,
            copies_beside=copies_beside,
        )
        for batch_size in shape.batch_sizes
    }


def make_passes(shape: EngineShape, index: SketchShape, device: torch.device) -> dict[int, SketchPass]:
    """Make a pass over the codes for each batch size, where the search makes none, or makes it with another query."""
    return {
        batch_size: SketchPass(
            index,
            batch_size=batch_size,
            max_context_len=shape.max_context_len,
            max_segments=shape.max_segments,
            softmax_scale=shape.softmax_scale,
            query_dtype=shape.dtype,
            device=device,
            keeps_scores=False,
            sums_rest=True,
        )
        for batch_size in shape.batch_sizes
    }


class ResidentRows:
    """Owns the sinks and the window of every loaded context, on the device, and with `rest` moments also the moments
    of the rows between them."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        row, dtype = shape.context_row
        size = shape.num_layers, shape.num_contexts, shape.num_kv_heads * shape.max_resident_len, *row
        self._rows = torch.zeros(size, dtype=dtype, device=device)
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        self._sources = row_sources(self._rows, self._lens)
        self._moments: list[DeviceMoments] = []
        if shape.rest == "moments":
            of_layer = shape.num_contexts, *moments_shape(shape.num_kv_heads, shape.head_dim)
            tables = torch.zeros((shape.num_layers, *of_layer), dtype=shape.dtype, device=device)
            num_rows = torch.zeros_like(self._lens)
            self._moments = [DeviceMoments(table, num_rows) for table in tables]

    def load(self, context_id: int, layers: Sequence[Tensor], plain: Sequence[Tensor] | None = None) -> None:
        """Copy the resident rows of a context.

        layers: each [num_kv_heads, context_len, 2, head_dim], or coded; plain: the rows as built, if layers are coded.
        """
        context_len = layers[0].shape[1]
        sink_end = min(self._shape.search.sink_len, context_len)
        window_start = max(sink_end, context_len - self._shape.search.window_len)
        resident_len = sink_end + context_len - window_start
        num_rows = self._shape.num_kv_heads * resident_len
        for place, kv in zip(self._rows[:, context_id], layers, strict=True):
            rows = place[:num_rows].view(self._shape.num_kv_heads, resident_len, *kv.shape[2:])
            rows[:, :sink_end].copy_(kv[:, :sink_end])
            rows[:, sink_end:].copy_(kv[:, window_start:])
        self._lens[context_id] = resident_len
        if self._moments:
            self._load_moments(context_id, [kv[:, sink_end:window_start] for kv in plain or layers])

    def _load_moments(self, context_id: int, middles: Sequence[Tensor]) -> None:
        """Compute the moments. middles: the selectable rows of each layer, which may lie on the host."""
        self._moments[0].num_rows[context_id] = middles[0].shape[1]
        if middles[0].shape[1] == 0:
            return
        for of_layer, rows in zip(self._moments, middles, strict=True):
            moments = moments_of(piece.to(self._device) for piece in torch.split(rows, _PIECE_ROWS, dim=1))
            of_layer.table[context_id] = moment_table(moments, self._shape.softmax_scale, self._shape.dtype)

    def source(self, layer_idx: int) -> RowSource:
        return self._sources[layer_idx]

    def moments(self, layer_idx: int) -> DeviceMoments | None:
        """The moments of the selectable rows; None unless `rest` is moments."""
        return self._moments[layer_idx] if self._moments else None
