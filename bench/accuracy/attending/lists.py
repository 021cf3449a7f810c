"""The published method's lists, which hold the best-scoring keys of every centroid. They only choose rows."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from bench.accuracy.attending.attend import Codes
from bench.accuracy.attending.context import ContextLayer
from csattn.config import ListConfig
from csattn.table.lists import list_bytes
from index_build.codebooks import make_codebooks


class ListCodes(Codes):
    """Float16 scores of the keys in each centroid's list. Lists are not stored: each is made when a query needs it."""

    def __init__(self, layer: ContextLayer, config: ListConfig, codebooks: Tensor | None = None):
        """codebooks: the result of `make_layer_codebooks`, which is called if None."""
        self._config = config
        self._codebooks = make_layer_codebooks(layer, config) if codebooks is None else codebooks
        self._mean = layer.k.mean(1, keepdim=True) if config.center_keys else torch.zeros_like(layer.k[:, :1])
        self._keys = layer.k - self._mean
        context_len = self._keys.shape[1]
        of_list = list_bytes(config.list_entries(context_len), context_len)
        self.bytes_per_key = config.num_subspaces * config.num_centroids * of_list / context_len
        self.fixed_bytes = self._codebooks.nbytes

    def logits(self, q: Tensor) -> Tensor:
        """Return the sums of the keys' weighted scores in the chosen lists; -inf for keys in none of them."""
        return self._sums(q, self._keys, None)

    def logits_with_own(self, q: Tensor, own_keys: Tensor, joined: Tensor) -> Tensor:
        """Like `logits`; own rows that have joined compete for places in the lists, which do not grow."""
        num_tokens = q.shape[1] // len(joined)
        is_there = torch.nn.functional.pad(joined, (self._keys.shape[1], 0), value=True).repeat(num_tokens, 1)
        return self._sums(q, torch.cat([self._keys, own_keys - self._mean], dim=1), is_there)

    def _sums(self, q: Tensor, keys: Tensor, is_there: Tensor | None) -> Tensor:
        """is_there: bool [n, num_keys], which rows the lists may hold for each query; None: all."""
        num_subspaces = self._config.num_subspaces
        list_len = self._config.list_entries(self._keys.shape[1])
        sums = torch.zeros(*q.shape[:2], keys.shape[1], device=q.device)
        is_listed = torch.zeros(sums.shape, dtype=torch.bool, device=q.device)
        q_parts, key_parts = (x.unflatten(2, (num_subspaces, -1)).transpose(1, 2) for x in (q, keys))
        for head in range(len(q)):
            for codebook, queries, rows in zip(self._codebooks[head], q_parts[head], key_parts[head], strict=True):
                lists = (queries @ codebook.mT).argmax(-1)
                of_query = slice(None)
                if is_there is None:  # queries of one centroid have the same list
                    lists, of_query = lists.unique(return_inverse=True)
                scores = (codebook[lists] @ rows.mT).half().float()
                if is_there is not None:
                    scores = scores.masked_fill_(~is_there, -torch.inf)
                in_list = scores >= _nth_largest(scores, list_len)
                weights = queries.norm(dim=-1, keepdim=True) if self._config.weigh_by_norm else 1.0
                sums[head] += weights * scores.masked_fill_(~in_list, 0.0)[of_query]
                is_listed[head] |= in_list[of_query]
        return sums.masked_fill_(~is_listed, -torch.inf)


def make_layer_codebooks(layer: ContextLayer, config: ListConfig) -> Tensor:
    """Cluster the context's own queries: [num_kv_heads, num_subspaces, num_centroids, subspace_dim]."""
    with ThreadPoolExecutor(1) as threads:
        return make_codebooks(layer.q.flatten(1, 2), config, threads)


def _nth_largest(scores: Tensor, n: int) -> Tensor:
    """Return the n-th largest score of each row: [num_rows, 1]."""
    if scores.is_cuda:
        return scores.topk(n, dim=1, sorted=False).values.amin(1, keepdim=True)
    place = scores.shape[1] - n  # numpy's selection is several times as fast as torch's
    return torch.from_numpy(np.partition(scores.numpy(), place, axis=1)[:, place : place + 1])
