"""The search of a batch: memory is allocated once; at every step, launches allocate nothing and never wait."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.lists_pass import ListsPass
from csattn.search.device.shapes import IndexShape, SketchShape
from csattn.search.device.sketch_pass import SketchPass


class DeviceSearch:
    """Chooses rows for a whole batch. Definition: `csattn.search.reference.search`, without a tail.

    A row's selection does not depend on the other rows of the batch.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        batch_size: int,
        max_context_len: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
        max_segments: int = 0,  # sketches only
        sums_rest: bool = False,  # sketches only: `scores.attend_rest` may follow a search
        beside: bool = False,  # whether it runs beside another search, on another stream
    ) -> None:
        self.shape, self.batch_size, self.max_context_len = shape, batch_size, max_context_len
        make: Callable[..., SketchPass | ListsPass]
        if isinstance(shape, SketchShape):
            make = partial(
                SketchPass, shape, max_segments=max_segments, keeps_scores=True, sums_rest=sums_rest, beside=beside
            )
        else:
            make = partial(ListsPass, shape)
        self.scores = make(
            batch_size=batch_size,
            max_context_len=max_context_len,
            softmax_scale=softmax_scale,
            query_dtype=query_dtype,
            device=device,
        )

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
        top_ks: Tensor | None = None,  # [batch_size] int32: a row's K, where less than its context's
    ) -> None:
        """Enqueue the search of one layer on torch's current stream."""
        expected = self.batch_size, self.shape.num_index_heads
        assert out.kv_indices.shape[:2] == expected, f"out has shape {tuple(out.kv_indices.shape)}"
        self.scores.run(q, indexes, layer_idx, context_ids)
        self.scores.choose(indexes, layer_idx, context_ids, out, top_ks)


def workspace_bytes(scores: SketchPass | ListsPass) -> int:
    """Return the device memory that a pass has allocated or, if it was made on `meta`, would allocate."""
    return sum(part.nbytes for part in vars(scores).values() if isinstance(part, Tensor))
