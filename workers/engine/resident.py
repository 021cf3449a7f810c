"""What each step reads of every context, copied together on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.attention.device import RowSource, row_sources
from csattn.rest import moments_of
from csattn.rest.device import DeviceMoments, moment_table, moments_shape
from workers.engine.shape import EngineShape

_PIECE_ROWS = 8192  # that are brought to the device at a time


class ResidentRows:
    """Owns the sinks and the window of every loaded context, on the device, and, for an estimate of what is not
    selected, the moments of the rows between."""

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
        """Take the resident rows of a context.

        layers: each [num_kv_heads, context_len, 2, head_dim], or coded; plain: where they are coded, the rows as built.
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
        """middles: of each layer, the rows that may be selected. They may lie on the host."""
        self._moments[0].num_rows[context_id] = middles[0].shape[1]
        if middles[0].shape[1] == 0:
            return
        for of_layer, rows in zip(self._moments, middles, strict=True):
            moments = moments_of(piece.to(self._device) for piece in torch.split(rows, _PIECE_ROWS, dim=1))
            of_layer.table[context_id] = moment_table(moments, self._shape.softmax_scale, self._shape.dtype)

    def source(self, layer_idx: int) -> RowSource:
        return self._sources[layer_idx]

    def moments(self, layer_idx: int) -> DeviceMoments | None:
        """Of the rows that may be selected, where the rest is estimated."""
        return self._moments[layer_idx] if self._moments else None
