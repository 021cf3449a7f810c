"""Compressed attention of whole steps on a device: what rows add, choose and attend to, as one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import KeyPages, score_pages, sparse_mla, top_k
from csattn.models.compressed import CompressedQueries
from csattn.models.spec import CompressedSpec
from csattn.models.weights import CompressedLayerWeights
from workers.engine.compressed_memory import CompressedLayer, CompressedMemory, SeenCompressed, SeenRows
from workers.engine.compressed_ops import CompressedOps
from workers.engine.shape import EngineShape
from workers.model.attention import StepAttention
from workers.model.ops import CompressedRoom


class AttendCompressed(StepAttention):
    """Of all layers of a model."""

    def __init__(
        self,
        shape: EngineShape,
        weights: Sequence[CompressedLayerWeights],
        memory: CompressedMemory,
        device: torch.device,
    ) -> None:
        self.shape, self.memory, self._weights = shape, memory, weights
        self.tails: Sequence[Tensor] = memory.tails
        self._seen: SeenRows | None = None  # of the step that is captured or run
        self._scale = torch.ones(1, 1, device=device)  # of every index key
        self._ops = _ops_for(device)

    def __repr__(self) -> str:
        return f"<AttendCompressed {self.memory!r}>"

    def attend_compressed(self, layer_idx: int, room: CompressedRoom, rows: StepRows) -> None:
        spec, weights, layer = self.shape.compressed[layer_idx], self._weights[layer_idx], self.memory.layers[layer_idx]
        if layer_idx == 0:
            self._seen = self.memory.find(rows, self._weights)
        seen, ops = self._seen, self._ops
        assert seen is not None
        of_ratio = seen.by_ratio[spec.ratio]
        ops.take_up(room.inputs, weights, spec, seen, of_ratio, layer)
        if weights.rows is not None:
            ops.compress(weights, spec, seen, of_ratio, layer)
        asked = ops.ask(room.projected, room.inputs, weights, spec, seen, of_ratio, layer)
        attended = of_ratio.attended
        if spec.indexer is not None:
            attended = torch.cat((seen.near, self._chosen(asked, spec, of_ratio, layer)), dim=1)
        out, _ = sparse_mla(asked.q, None, layer.rows, None, attended, spec.head_dim**-0.5, attn_sink=weights.sinks)
        ops.turn_back(out, weights, spec, seen, of_ratio, room.attended)

    def _chosen(
        self, asked: CompressedQueries, spec: CompressedSpec, seen: SeenCompressed, layer: CompressedLayer
    ) -> Tensor:
        """Where the compressed rows of the best keys lie: [batch_size, top_k] int32, -1 padded."""
        assert asked.index_q is not None and asked.index_weights is not None
        pages = KeyPages(layer.keys[:, None], self._scale.expand(len(layer.keys), 1))
        told = asked.index_q, asked.index_weights, pages, seen.places, seen.lens
        scores = score_pages(*told, longer_than=spec.top_k)
        return top_k(scores, spec.top_k, seen.lens, order="position", pages=seen.rows)


def _ops_for(device: torch.device) -> CompressedOps:
    if device.type == "cpu":
        return CompressedOps()
    from workers.engine.compressed_triton_ops import TritonCompressedOps  # Triton is only there on a GPU

    return TritonCompressedOps()
