"""Compressed attention of whole steps on a device: what rows add, choose and attend to, as one graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import KeyPages, score_pages, sparse_mla, top_k
from csattn.models.compressed import CompressedQueries, added, compressed_queries, compressed_rows, grouped, own_rows
from csattn.models.weights import CompressedLayerWeights
from workers.engine.compressed_memory import CompressedMemory, SeenCompressed, SeenRows
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
        self._seen: tuple[SeenRows, dict[int, SeenCompressed]] | None = None  # of the step that is captured or run
        self._scale = torch.ones(1, 1, device=device)  # of every index key

    def __repr__(self) -> str:
        return f"<AttendCompressed {self.memory!r}>"

    def attend_compressed(self, layer_idx: int, room: CompressedRoom, rows: StepRows) -> None:
        spec, weights, layer = self.shape.compressed[layer_idx], self._weights[layer_idx], self.memory.layers[layer_idx]
        if layer_idx == 0:
            self._seen = self.memory.find(rows)
        assert self._seen is not None
        seen, by_ratio = self._seen
        layer.rows[seen.own] = own_rows(room.inputs, weights, rows.positions).to(layer.rows.dtype)
        asked = compressed_queries(room.projected, room.inputs, weights, spec, rows.positions)
        attended = [seen.near]
        if spec.ratio:
            far = by_ratio[spec.ratio]
            self._compress(layer_idx, room.inputs, seen.slots, rows.positions, far)
            places = far.places if spec.indexer is None else self._chosen(layer_idx, asked, far)
            attended.append(torch.where(places >= 0, places + self.memory.first_compressed, -1))
        out, _ = sparse_mla(
            asked.q.to(layer.rows.dtype),
            None,
            layer.rows,
            None,
            torch.cat(attended, dim=1),
            spec.head_dim**-0.5,
            attn_sink=weights.sinks,
        )
        room.attended.copy_(grouped(out, weights, spec, rows.positions))

    def _compress(self, layer_idx: int, inputs: Tensor, slots: Tensor, positions: Tensor, far: SeenCompressed) -> None:
        """Take up what the rows add, and make the compressed rows that end with one of them."""
        spec, weights, layer = self.shape.compressed[layer_idx], self._weights[layer_idx], self.memory.layers[layer_idx]
        num_pending, of_rows, of_keys = layer.pending.shape[1], *spec.compressed_widths
        layer.pending[slots, positions % num_pending] = added(inputs, spec).float()
        span = positions[:, None] + torch.arange(1 - spec.span, 1, device=positions.device)
        parts = torch.split(layer.pending[slots[:, None], span % num_pending], [of_rows, of_rows, of_keys, of_keys], -1)
        assert weights.rows is not None
        made = compressed_rows(parts[0], parts[1], weights.rows, far.first)
        layer.rows[self.memory.first_compressed + far.written] = made.to(layer.rows.dtype)
        if weights.keys is not None:
            keys = compressed_rows(parts[2], parts[3], weights.keys, far.first)
            layer.keys[far.written] = keys.to(layer.keys.dtype)

    def _chosen(self, layer_idx: int, asked: CompressedQueries, far: SeenCompressed) -> Tensor:
        """Where the compressed rows of the best keys lie: [batch_size, top_k] int32, -1 padded."""
        keys, most = self.memory.layers[layer_idx].keys, self.shape.compressed[layer_idx].top_k
        assert asked.index_q is not None and asked.index_weights is not None
        pages = KeyPages(keys[:, None], self._scale.expand(len(keys), 1))
        q = asked.index_q.to(keys.dtype)
        scores = score_pages(q, asked.index_weights, pages, far.places, far.lens, longer_than=most)
        return top_k(scores, most, far.lens, order="position", pages=far.places)
