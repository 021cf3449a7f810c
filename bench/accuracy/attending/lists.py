"""The published method's lists: of every centroid the keys that score best, for choosing alone."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer
from csattn.config import ListConfig
from index_build.codebooks import make_codebooks

_INDEX_BYTES, _SCORE_BYTES = 4, 2


class ListCodes(Codes):
    """Every key's float16 score for every centroid, -inf where the centroid's list does not have it."""

    def __init__(self, layer: ContextLayer):
        context_len = layer.context_len
        config = ListConfig(kmeans="torch")
        with ThreadPoolExecutor(1) as threads:
            self._codebooks = make_codebooks(layer.q.flatten(1, 2), config, threads)
        keys = (layer.k - layer.k.mean(1, keepdim=True)).unflatten(2, (config.num_subspaces, -1)).permute(0, 2, 3, 1)
        list_len = config.list_entries(context_len)
        self._scores = torch.empty(*self._codebooks.shape[:3], context_len, dtype=torch.float16, device=keys.device)
        for subspace in range(config.num_subspaces):
            scores = (self._codebooks[:, subspace] @ keys[:, subspace]).half()
            least = scores.topk(list_len, dim=2).values[..., -1:]
            self._scores[:, subspace] = scores.masked_fill_(scores < least, -torch.inf)
        entries = config.num_subspaces * config.num_centroids * list_len
        self.bytes_per_key = entries * (_INDEX_BYTES + _SCORE_BYTES) / context_len
        self.fixed_bytes = self._codebooks.nbytes

    def logits(self, q: Tensor) -> Tensor:
        """Sums of the chosen lists' weighted scores; -inf for keys that are in none of them."""
        parts = q.unflatten(2, (self._codebooks.shape[1], -1)).transpose(1, 2)  # [num_heads, num_subspaces, n, width]
        nearest, weights = (parts @ self._codebooks.mT).argmax(-1), parts.norm(dim=-1)
        sums = torch.zeros(*q.shape[:2], self._scores.shape[3], device=q.device)
        is_listed = torch.zeros(sums.shape, dtype=torch.bool, device=q.device)
        for head in range(len(q)):
            for subspace in range(parts.shape[1]):
                scores = self._scores[head, subspace, nearest[head, subspace]].float()
                in_list = scores > -torch.inf
                is_listed[head] |= in_list
                sums[head] += weights[head, subspace, :, None] * scores.masked_fill_(~in_list, 0.0)
        return sums.masked_fill_(~is_listed, -torch.inf)
