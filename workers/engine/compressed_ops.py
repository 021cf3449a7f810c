"""What becomes of a step's rows in compressed attention, before it attends and behind that: the definition."""

import torch
from torch import Tensor

from csattn.models.compressed import CompressedQueries, added, compressed_queries, compressed_rows, grouped, own_rows
from csattn.models.spec import CompressedSpec
from csattn.models.weights import CompressedLayerWeights
from workers.engine.compressed_memory import CompressedLayer, SeenCompressed, SeenRows


class CompressedOps:
    """Also what runs where there is no GPU. `TritonCompressedOps` has the same there."""

    def take_up(
        self,
        inputs: Tensor,  # [batch_size, sum of in_widths but the first]
        weights: CompressedLayerWeights,
        spec: CompressedSpec,
        seen: SeenRows,
        of_ratio: SeenCompressed,
        layer: CompressedLayer,  # of which the rows are written, and what they add to compressed ones
    ) -> None:
        """Rows come to where they are seen."""
        layer.rows[seen.own] = own_rows(inputs, weights, seen.positions).to(layer.rows.dtype)
        if spec.ratio:
            layer.pending[seen.slots, seen.positions % layer.pending.shape[1]] = added(inputs, spec).float()

    def compress(
        self,
        weights: CompressedLayerWeights,
        spec: CompressedSpec,
        seen: SeenRows,
        of_ratio: SeenCompressed,
        layer: CompressedLayer,  # of which compressed rows and their keys are written
    ) -> None:
        """Make the compressed rows that end with a row of the step."""
        num_pending, of_rows, of_keys = layer.pending.shape[1], *spec.compressed_widths
        span = seen.positions[:, None] + torch.arange(1 - spec.span, 1, device=seen.positions.device)
        pending = layer.pending[seen.slots[:, None], span % num_pending]
        parts = torch.split(pending, [of_rows, of_rows, of_keys, of_keys], -1)
        assert weights.rows is not None
        made = compressed_rows(parts[0], parts[1], weights.rows, of_ratio.first)
        layer.compressed[of_ratio.written] = made.to(layer.rows.dtype)
        if weights.keys is not None:
            keys = compressed_rows(parts[2], parts[3], weights.keys, of_ratio.first)
            layer.keys[of_ratio.written] = keys.to(layer.keys.dtype)

    def ask(
        self,
        projected: Tensor,  # [batch_size, q_width + index_q_width]
        inputs: Tensor,
        weights: CompressedLayerWeights,
        spec: CompressedSpec,
        seen: SeenRows,
        of_ratio: SeenCompressed,
        layer: CompressedLayer,  # whose dtype queries have
    ) -> CompressedQueries:
        asked = compressed_queries(projected, inputs, weights, spec, seen.positions)
        dtype = layer.rows.dtype
        index_q = None if asked.index_q is None else asked.index_q.to(dtype)
        return CompressedQueries(asked.q.to(dtype), index_q, asked.index_weights)

    def turn_back(
        self,
        attended: Tensor,  # [batch_size, num_heads, head_dim]
        weights: CompressedLayerWeights,
        spec: CompressedSpec,
        seen: SeenRows,
        of_ratio: SeenCompressed,
        out: Tensor,  # [num_groups, batch_size, width], written
    ) -> None:
        out.copy_(grouped(attended, weights, spec, seen.positions))
