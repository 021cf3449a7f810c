"""Operations on a step's rows before and after compressed attention: the definition, in torch."""

import torch
from torch import Tensor

from csattn.models.compressed import (
    compressed_queries,
    compressed_rows,
    own_rows,
    pending_of,
    unrotated,
)
from csattn.models.query import Queries
from csattn.models.weights import CompressedStepWeights
from workers.engine.gpu.compressed_memory import LayerMemory, SeenCompressed


class CompressedOps:
    """The definition, which also runs without a GPU. `TritonCompressedOps` has the kernels for a GPU."""

    def append(
        self,
        inputs: Tensor,  # [batch_size, sum of in_widths]
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,  # its rows are written, and what they add to compressed ones
    ) -> None:
        """Compute the step's rows, and store them with what they add to compressed rows."""
        layer.rows[seen.own] = own_rows(inputs, weights, seen.positions).to(layer.rows.dtype)
        if layer.spec.ratio:
            layer.pending[seen.slots, seen.positions % layer.pending.shape[1]] = pending_of(inputs, layer.spec).float()

    def compress(
        self,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,  # its compressed rows and their index keys are written
    ) -> None:
        """Make the compressed rows that a row of the step completes."""
        span = seen.positions[:, None] + torch.arange(1 - layer.spec.span, 1, device=seen.positions.device)
        pending = layer.pending[seen.slots[:, None], span % layer.pending.shape[1]]
        rows, keys = compressed_rows(pending, weights, layer.spec, seen.first)
        layer.compressed[seen.written] = rows.to(layer.rows.dtype)
        if keys is not None:
            layer.keys[seen.written] = keys.to(layer.keys.dtype)

    def make_queries(
        self,
        projected: Tensor,  # [batch_size, q_width + index_q_width]
        inputs: Tensor,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
    ) -> Queries:
        """Return the queries, in the dtype of the layer's rows; weights of index heads stay float32."""
        queries, dtype = compressed_queries(projected, inputs, weights, layer.spec, seen.positions), layer.rows.dtype
        index_q = None if queries.index_q is None else queries.index_q.to(dtype)
        return Queries(queries.q.to(dtype), index_q, queries.index_weights)

    def unrotate(
        self,
        attended: Tensor,  # [batch_size, num_heads, head_dim]
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
        out: Tensor,  # [num_groups, batch_size, width], written
    ) -> None:
        out.copy_(unrotated(attended, weights, layer.spec, seen.positions))
