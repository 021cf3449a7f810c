"""Other methods' choices, as `csattn/selectors` makes them, for many tokens at once and on the model's device.

The tokens' own rows are never searched: they are too few to leave a window.
"""

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer, Step
from csattn.selectors.base import ContextLayer as SelectorLayer
from csattn.selectors.magicpig import hash_codes, make_projections, sampling_probability
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.quest import PreparedQuest
from csattn.selectors.sparq import PreparedSparq

_ITEM_BYTES = 2  # of a number of the KV cache that the methods' bytes are compared with
_QUERIES_AT_ONCE, _KEYS_AT_ONCE = 256, 4096


class QuestCodes(Codes):
    """The minimum and maximum of each page's keys in every dimension."""

    fixed_bytes = 0

    def __init__(self, layer: ContextLayer):
        self._prepared, self._scale = PreparedQuest(_rows(layer)), layer.softmax_scale
        self.bytes_per_key = 2 * layer.k.shape[2] * _ITEM_BYTES / self._prepared.page_size

    def group_scores(self, q: Tensor, top_k: int) -> Tensor:
        """Rank pages by their bounds; within a page, earlier rows score higher, and all before the next page's."""
        prepared = self._prepared
        bounds = q.clamp_min(0).flatten(1, 2) @ prepared.high.mT + q.clamp_max(0).flatten(1, 2) @ prepared.low.mT
        pages = (self._scale * bounds.unflatten(1, q.shape[1:3])).softmax(-1).sum(1)
        places = pages.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        rows = torch.arange(prepared.context_len, device=q.device)
        return -(places[..., rows // prepared.page_size] * prepared.page_size + rows % prepared.page_size).float()


class PqcacheCodes(Codes):
    """Product-quantised keys: each subspace's nearest centroid, a byte each; two subspaces as published."""

    def __init__(self, layer: ContextLayer, num_subspaces: int = 2):
        prepared = PreparedPqcache(_rows(layer), num_subspaces)
        parts = [
            of_part.gather(1, codes.long()[..., None].expand(-1, -1, of_part.shape[2]))
            for of_part, codes in zip(prepared.centroids.unbind(1), prepared.codes.unbind(-1), strict=True)
        ]
        self._keys = torch.cat(parts, dim=2)
        self.bytes_per_key = float(prepared.codes.shape[2])
        self.fixed_bytes = prepared.centroids.numel() * _ITEM_BYTES

    def logits(self, q: Tensor) -> Tensor:
        return q @ self._keys.mT


class SparqCodes(Codes):
    """Scores from the query's largest components only and, as published, the mean value for the rows left out."""

    fixed_bytes = 0

    def __init__(self, layer: ContextLayer, adds_mean: bool = True):
        self._adds_mean, self._layer, self._prepared = adds_mean, layer, PreparedSparq(_rows(layer))
        self.bytes_per_key = float(layer.k.shape[2] * _ITEM_BYTES)  # a second copy of the keys

    def group_scores(self, q: Tensor, top_k: int) -> Tensor:
        return self._part_of(q).sum(1) @ self._layer.k.mT

    def finish(self, out: Tensor, q: Tensor, step: Step, seen: Tensor, is_read: Tensor) -> Tensor:
        """Mix `out` with the mean of all values, weighted by the approximate softmax share of the rows not read."""
        if not self._adds_mean:
            return out
        context_len, part = self._layer.context_len, self._part_of(q).flatten(1, 2)
        logits = torch.cat([part @ self._layer.k.mT, part @ step.k.mT], dim=2)
        seen = seen.repeat(q.shape[1], 1)
        shares = logits.masked_fill_(~seen, -torch.inf).softmax(-1)[..., :context_len]
        left_out = shares.masked_fill_(is_read[..., :context_len], 0.0).sum(-1, keepdim=True)
        own = seen[:, context_len:].to(out.dtype)
        values = self._prepared.value_sum[:, None] + own @ step.v
        mean = values / (context_len + own.sum(-1, keepdim=True))
        left_out, mean = left_out.unflatten(1, q.shape[1:3]), mean.unflatten(1, q.shape[1:3])
        return (1 - left_out) * out + left_out * mean

    def _part_of(self, q: Tensor) -> Tensor:
        """Return the queries' largest components, scaled so that a product with a key approximates its logit."""
        size = q.abs()
        best = size.sum(1, keepdim=True).topk(self._prepared.num_components, dim=-1).indices
        covered = torch.zeros_like(q).scatter_(3, best.expand(-1, q.shape[1], -1, -1), 1.0)
        share = (size * covered).sum(-1, keepdim=True) / size.sum(-1, keepdim=True).clamp_min(1e-30)
        return q * covered * self._layer.softmax_scale / share.clamp_min(1e-12).sqrt()


class H2oCodes(Codes):
    """The attention that each key has received from the context's own queries."""

    bytes_per_key, fixed_bytes, evicts = 4.0, 0, True

    def __init__(self, layer: ContextLayer):
        self._received = torch.zeros(layer.k.shape[:2], device=layer.k.device)
        keys = torch.arange(layer.context_len, device=layer.k.device)
        for first in range(0, layer.context_len, _QUERIES_AT_ONCE):
            rows = slice(first, first + _QUERIES_AT_ONCE)
            logits = layer.softmax_scale * layer.q[:, :, rows].flatten(1, 2) @ layer.k.mT
            logits.masked_fill_((keys > keys[rows, None]).repeat(layer.q.shape[1], 1), -torch.inf)
            self._received += logits.softmax(-1).sum(1)

    def group_scores(self, q: Tensor, top_k: int) -> Tensor:
        return self._received[:, None].repeat(1, q.shape[2], 1)


class MagicpigCodes(Codes):
    """Hashes by signs of random projections; each query head reads the rows that collide with it in two tables."""

    fixed_bytes, device_bytes_per_key = 0, 0.0

    def __init__(self, layer: ContextLayer, num_bits: int, num_tables: int):
        self._num_bits, self._num_tables = num_bits, num_tables
        self._projections = make_projections(layer.k.shape[2], num_bits, num_tables).to(layer.k.device)
        self._centred = layer.k - layer.k.mean(1, keepdim=True)
        blocks = [self._hash(block) for block in torch.split(self._centred, _KEYS_AT_ONCE, dim=1)]
        self._codes = torch.cat(blocks, dim=1).permute(2, 0, 1).contiguous()  # [num_tables, num_kv_heads, context_len]
        self.bytes_per_key = 4.0 * (num_tables + 1)  # row numbers, and norms

    def sampled(self, q: Tensor) -> tuple[Tensor, Tensor]:
        met = torch.zeros(*q.shape[:2], self._centred.shape[1], dtype=torch.int16, device=q.device)
        for of_queries, of_keys in zip(self._hash(q).unbind(-1), self._codes, strict=True):
            met += of_queries[..., None] == of_keys[:, None]
        is_met = met >= 2
        head, query, key = is_met.nonzero(as_tuple=True)
        log_chance = torch.zeros(is_met.shape, device=q.device)
        for some in torch.arange(len(head), device=q.device).split(1 << 22):
            at = head[some], query[some], key[some]
            cosines = torch.cosine_similarity(self._centred[at[0], at[2]], q[at[0], at[1]], dim=-1)
            log_chance[at] = sampling_probability(cosines, self._num_bits, self._num_tables).log().float()
        return is_met, log_chance

    def _hash(self, x: Tensor) -> Tensor:
        return hash_codes(x, self._projections, self._num_tables)


def _rows(layer: ContextLayer) -> SelectorLayer:
    def unasked() -> Tensor:
        raise AssertionError("only H2O asks what attention keys have received")

    return SelectorLayer(layer.k, layer.v, layer.q.shape[0] * layer.q.shape[1], unasked)
