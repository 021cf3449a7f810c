"""H2O (arXiv:2306.14048) on the device: attention to the rows that are left, and the book of what they receive.

As in every placement here the whole tail stays, so no row of it stands for election: that is to its advantage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.decode.rivals.kept_rows import KeptRows
from csattn.batch import StepRows
from workers.engine.shape import EngineShape


class HeavySteps:
    """`StepAttention` in one captured graph. Nothing but `kept` is left of a context."""

    lookahead = False
    in_graph = True

    def __init__(self, shape: EngineShape, num_kept: int, device: torch.device) -> None:
        """num_kept: heavy rows, sinks and window of a context."""
        self.tails = shape.make_tails(device)
        (batch_size,) = shape.batch_sizes
        size = shape.num_layers, shape.num_contexts, shape.num_kv_heads, num_kept
        self.kept = torch.zeros(*size, 2, shape.head_dim, dtype=shape.dtype, device=device)
        self.received = torch.zeros(size, dtype=torch.float32, device=device)
        self._rows = KeptRows(batch_size, shape.num_q_heads, num_kept, self.tails, shape.softmax_scale, keeps_book=True)

    def load(self, context_id: int, layer_idx: int, kept: Tensor, received: Tensor) -> None:
        """kept: [num_kv_heads, num_kept, 2, head_dim]; received: [num_kv_heads, num_kept] float32."""
        self.kept[layer_idx, context_id].copy_(kept)
        self.received[layer_idx, context_id].copy_(received)

    def begin_step(self, rows: StepRows) -> None: ...

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None: ...

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        kept = self.kept[layer_idx]
        self._rows.attend(q, kept, self.tails[layer_idx], rows)
        self._rows.finish(kept, self.received[layer_idx], None, rows, out)

    def end_step(self, rows: StepRows) -> None: ...


def heavy_rows(received: Tensor, middle: slice, top_k: int) -> Tensor:
    """The rows of the middle that have received most, then sinks and window: [num_kv_heads, num_kept] int64.

    received: [num_kv_heads, context_len].
    """
    heavy = middle.start + received[:, middle].topk(top_k, dim=1).indices.sort(1).values
    context_len = received.shape[1]
    resident: Sequence[int] = [*range(middle.start), *range(middle.stop, context_len)]
    always = torch.tensor(resident, device=received.device).expand(len(received), -1)
    return torch.cat([heavy, always], dim=1)
