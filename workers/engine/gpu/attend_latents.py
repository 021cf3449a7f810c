"""Latent attention (MLA) of whole steps on a device: to rows that the model's indexer chooses, or to all."""

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import KeyPages, score_pages, sparse_mla, top_k
from csattn.models.query import Queries
from csattn.models.spec import ModelSpec
from workers.engine.gpu.latent_memory import CachedLatents, LatentPlaces, SeenRows
from workers.engine.gpu.shape import EngineShape
from workers.model.attention import StepAttention


class AttendLatents(StepAttention):
    """Chooses as `csattn.models.latent.choose_rows` does. A step is one graph.

    A layer without an indexer attends to what the last layer with an indexer has chosen.
    """

    def __init__(
        self, shape: EngineShape, spec: ModelSpec, far: LatentPlaces | CachedLatents, device: torch.device
    ) -> None:
        self.shape, self.far = shape, far
        self.tails: Tensor = far.tails
        self._latents = [layer.latent for layer in spec.layers]
        (self._top_k,) = {latent.top_k for latent in self._latents if latent is not None}  # the same in all layers
        self._seen = {size: SeenRows.of(shape, size, device) for size in shape.batch_sizes}
        # shared by all index keys, which are not quantized
        self._scale = torch.ones(1, 1, dtype=torch.float32, device=device)

    def attend_latents(self, layer_idx: int, queries: Queries, rows: StepRows, out: Tensor) -> None:
        spec, seen = self._latents[layer_idx], self._seen[rows.batch_size]
        assert spec is not None
        if layer_idx == 0:
            self.far.numbers.find(rows, seen)
        if spec.indexer is not None:
            self._choose(queries, self.far.index_keys(layer_idx), seen)
        kept, chosen = self.far.attended(layer_idx, rows, seen)
        parts = queries.q[..., : spec.kv_rank].contiguous(), queries.q[..., spec.kv_rank :].contiguous()
        latents, rope_keys = kept[:, : spec.kv_rank], kept[:, spec.kv_rank : spec.key_width]
        sparse_mla(*parts, latents, rope_keys, chosen, self.shape.softmax_scale, out=out)

    def _choose(self, queries: Queries, keys: Tensor, seen: SeenRows) -> None:
        """Score the index keys and choose the best. keys: [num_places, 1, index_head_dim]; every key is a page."""
        assert queries.index_q is not None and queries.index_weights is not None and self._top_k is not None
        pages = KeyPages(keys, self._scale.expand(len(keys), 1))
        operands = queries.index_q, queries.index_weights, pages, seen.places, seen.lens
        scores = score_pages(*operands, longer_than=self._top_k, out=seen.scores)
        top_k(scores, self._top_k, seen.lens, order="position", pages=self.far.pages_of(seen), out=seen.chosen)
