"""The published schedule that searches every few steps only, on the device: the engine itself always searches."""

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows, make_device_selection
from csattn.search.device import IndexShape
from workers.engine import DeviceRows, EngineShape, SearchOnDevice


class PeriodicSteps(SearchOnDevice):
    """Steps that search or do not, by what `searches` is when they are captured.

    Every layer keeps its selection from one search to the next.
    """

    def __init__(self, shape: EngineShape, index: IndexShape, far: DeviceRows, device: torch.device) -> None:
        super().__init__(shape, index, far, device)
        self.searches = True
        (batch_size,) = shape.batch_sizes
        self._kept = [
            make_device_selection(batch_size, shape.num_index_heads, shape.max_top_k, device)
            for _ in range(shape.num_layers)
        ]

    def _search(self, layer_idx: int, q: Tensor, rows: StepRows) -> DeviceSelection:
        kept = self._kept[layer_idx]
        if self.searches:
            self._searches[rows.batch_size].search(q, self._indexes, layer_idx, rows.context_ids, kept)
        return kept
