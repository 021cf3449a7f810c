"""Plan once, search at every step: memory is set aside here, launches allocate nothing and never wait."""

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.lists_pass import ListsPass
from csattn.search.device.shapes import IndexShape, SketchShape
from csattn.search.device.sketch_pass import SketchPass


class DeviceSearch:
    """Chooses rows for a whole batch. Definition: `csattn.search.reference.search`, without a tail.

    A selection does not depend on the batch it is made in.
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
        max_segments: int = 0,  # of a sketch
        sums_rest: bool = False,  # of a sketch: `scores.attend_rest` may follow
    ) -> None:
        self.shape, self.batch_size, self.max_context_len = shape, batch_size, max_context_len
        self.scores: SketchPass | ListsPass
        if isinstance(shape, SketchShape):
            self.scores = SketchPass(
                shape,
                batch_size=batch_size,
                max_context_len=max_context_len,
                max_segments=max_segments,
                softmax_scale=softmax_scale,
                query_dtype=query_dtype,
                device=device,
                keeps_scores=True,
                sums_rest=sums_rest,
            )
        else:
            self.scores = ListsPass(
                shape,
                batch_size=batch_size,
                max_context_len=max_context_len,
                softmax_scale=softmax_scale,
                query_dtype=query_dtype,
                device=device,
            )

    def __repr__(self) -> str:
        return f"<DeviceSearch for {self.batch_size} rows of {self.max_context_len} keys>"

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
        top_ks: Tensor | None = None,  # [batch_size] int32: K of rows for which it is less than their context's
    ) -> None:
        """Enqueue the search of one layer on torch's current stream."""
        expected = self.batch_size, self.shape.num_index_heads
        assert out.kv_indices.shape[:2] == expected, f"out has shape {tuple(out.kv_indices.shape)}"
        self.scores.run(q, indexes, layer_idx, context_ids)
        self.scores.choose(indexes, layer_idx, context_ids, out, top_ks)


def workspace_bytes(scores: SketchPass | ListsPass) -> int:
    """Device memory that it has set aside, or would have if it were not made on `meta`."""
    return sum(part.nbytes for part in vars(scores).values() if isinstance(part, Tensor))
