"""Attention by codes to what a step does not select, by the step's own queries."""

import torch
from torch import Tensor

from csattn.attention.device import DeviceAttention
from csattn.batch import DeviceSelection, StepRows
from csattn.search.device import DeviceIndexes, SketchPass, SketchShape
from workers.engine.shape import EngineShape


class CodedRest:
    """For steps that select by other queries than their own, or elsewhere: reads the codes once more."""

    def __init__(self, shape: EngineShape, index: SketchShape, indexes: DeviceIndexes, device: torch.device) -> None:
        self._indexes, self._passes = indexes, make_passes(shape, index, device)

    def sum_up(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        """Enqueue sums over all rows that may be selected: nothing of it waits for the selection."""
        self._passes[rows.batch_size].run(q, self._indexes, layer_idx, rows.context_ids)

    def post(self, layer_idx: int, selected: DeviceSelection, rows: StepRows, attention: DeviceAttention) -> None:
        """Enqueue what takes the selected rows out of the sums and posts what is left to `attention`, which follows."""
        post_rest(self._passes[rows.batch_size], self._indexes, layer_idx, selected, rows, attention)


def make_passes(shape: EngineShape, index: SketchShape, device: torch.device) -> dict[int, SketchPass]:
    """A pass over the codes for each batch size."""
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


def post_rest(
    pass_over: SketchPass,
    indexes: DeviceIndexes,
    layer_idx: int,
    selected: DeviceSelection,  # rows of the context
    rows: StepRows,
    attention: DeviceAttention,
) -> None:
    """Enqueue attention to what a pass has summed up and the step does not select, for `attention`, which follows."""
    posted = attention.posted, attention.rest_parts
    pass_over.attend_rest(indexes, layer_idx, rows.context_ids, selected, *posted)
