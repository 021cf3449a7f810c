"""Compressed attention (DeepSeek-V4) of whole steps on a device, captured in one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import KeyPages, score_pages, sparse_mla, top_k
from csattn.models.query import Queries
from csattn.models.weights import CompressedStepWeights
from workers.engine.gpu.compressed_memory import CompressedMemory, LayerMemory, SeenCompressed
from workers.engine.gpu.compressed_ops import CompressedOps
from workers.engine.gpu.shape import EngineShape
from workers.model.attention import StepAttention
from workers.model.ops import CompressedBuffers


class AttendCompressed(StepAttention):
    """Writes a step's rows, completes compressed rows, chooses among them, and attends, for all layers of a model."""

    def __init__(
        self,
        shape: EngineShape,
        weights: Sequence[CompressedStepWeights],
        memory: CompressedMemory,
        device: torch.device,
    ) -> None:
        self.shape, self.memory, self._weights = shape, memory, weights
        self.tails: Sequence[Tensor] = memory.tails
        self._seen: dict[int, SeenCompressed] = {}  # by compression ratio, of the step that is captured or run
        # shared by all index keys, which are not quantized
        self._scale = torch.ones(1, 1, dtype=torch.float32, device=device)
        self._ops = _ops_for(device)

    def attend_compressed(self, layer_idx: int, buffers: CompressedBuffers, rows: StepRows) -> None:
        if layer_idx == 0:
            self._seen = self.memory.find(rows, self._weights)
        ops, weights, layer = self._ops, self._weights[layer_idx], self.memory.layers[layer_idx]
        seen, scale = self._seen[layer.spec.ratio], layer.spec.head_dim**-0.5
        ops.append(buffers.inputs, weights, seen, layer)
        if weights.rows is not None:
            ops.compress(weights, seen, layer)
        queries = ops.make_queries(buffers.projected, buffers.inputs, weights, seen, layer)
        attended = seen.attended
        if queries.index_q is not None:
            attended = torch.cat((seen.near, self._chosen(queries, seen, layer)), dim=1)
        out, _ = sparse_mla(queries.q, None, layer.rows, None, attended, scale, attn_sink=weights.sinks)
        ops.unrotate(out, weights, seen, layer, buffers.attended)

    def _chosen(self, queries: Queries, seen: SeenCompressed, layer: LayerMemory) -> Tensor:
        """Return where the compressed rows with the best index keys lie: [batch_size, top_k] int32, -1 padded."""
        assert queries.index_q is not None and queries.index_weights is not None
        most, pages = layer.spec.top_k, KeyPages(layer.keys[:, None], self._scale.expand(len(layer.keys), 1))
        scores = score_pages(queries.index_q, queries.index_weights, pages, seen.places, seen.lens, longer_than=most)
        return top_k(scores, most, seen.lens, order="position", pages=seen.rows)


def _ops_for(device: torch.device) -> CompressedOps:
    if device.type == "cpu":
        return CompressedOps()
    from workers.engine.gpu.compressed_triton_ops import TritonCompressedOps  # late: only a GPU needs Triton

    return TritonCompressedOps()
