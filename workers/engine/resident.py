"""The rows of every context that each step attends to, copied together on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.attention.device import RowSource, row_sources
from workers.engine.shape import EngineShape


class ResidentRows:
    """Owns the sinks and the window of every loaded context, on the device."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._shape = shape
        size = shape.num_layers, shape.num_contexts, shape.num_kv_heads * shape.max_resident_len, 2, shape.head_dim
        self._rows = torch.zeros(size, dtype=shape.dtype, device=device)
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        self._sources = row_sources(self._rows, self._lens)

    def load(self, context_id: int, layers: Sequence[Tensor]) -> None:
        """Take the resident rows of a context. layers: each [num_kv_heads, context_len, 2, head_dim]."""
        context_len = layers[0].shape[1]
        sink_end = min(self._shape.search.sink_len, context_len)
        window_start = max(sink_end, context_len - self._shape.search.window_len)
        resident_len = sink_end + context_len - window_start
        num_rows = self._shape.num_kv_heads * resident_len
        for place, kv in zip(self._rows[:, context_id], layers, strict=True):
            rows = place[:num_rows].view(self._shape.num_kv_heads, resident_len, 2, -1)
            rows[:, :sink_end].copy_(kv[:, :sink_end])
            rows[:, sink_end:].copy_(kv[:, window_start:])
        self._lens[context_id] = resident_len

    def source(self, layer_idx: int) -> RowSource:
        return self._sources[layer_idx]
