"""PQCache (arXiv:2407.12820): keys as product-quantiser codes; products of q with the centroids approximate logits.

As published, also for groups: head_dim is split into 2 parts, with k-means (Euclidean distance) over the context's keys
in each. A row's group score is the sum of its softmax shares over the group's query heads. A new key gets the codes of
its nearest centroids. 256 centroids (8 bits) and 15 iterations are the settings of CSAttention's comparison; PQCache's
own default is 64 centroids. Sinks and window are clustered, too, so that requests with any window share the codes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.key_clusters import kmeans, nearest_centroids
from csattn.selectors.top_rows import AppendedRows, joined, softmax_group_scores, top_rows

_SEED = 1234


class PreparedPqcache:
    """The codebooks of a context's keys, and the keys' codes.

    centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim] float32.
    codes: [num_kv_heads, context_len, num_subspaces] uint8.
    """

    def __init__(self, layer: ContextLayer, num_subspaces: int = 2, num_centroids: int = 256, num_iterations: int = 15):
        """num_centroids: at most 256; reduced to context_len for shorter contexts."""
        assert num_centroids <= 256, "a code is one byte"
        self.itemsize = layer.keys.itemsize
        num_centroids = min(num_centroids, layer.keys.shape[1])
        parts = split_parts(layer.keys.float(), num_subspaces).transpose(0, 1)
        centroids = kmeans(parts.flatten(0, 1), num_centroids, num_iterations, _SEED)
        self.centroids = centroids.view(*parts.shape[:2], num_centroids, -1)
        self.codes = self.encode(layer.keys.float())

    def encode(self, keys: Tensor) -> Tensor:
        """keys: [num_kv_heads, num_keys, head_dim] float32 -> [num_kv_heads, num_keys, num_subspaces] uint8."""
        parts = split_parts(keys, self.centroids.shape[1])
        codes = [nearest_centroids(part, self.centroids[:, b]) for b, part in enumerate(parts)]
        return torch.stack(codes, dim=-1).to(torch.uint8)

    @property
    def index_bytes(self) -> int:
        """The bytes of codes and centroids, with centroids in the dtype of the KV."""
        return self.codes.nbytes + self.centroids.numel() * self.itemsize

    def selector(self, view: ContextView) -> "PqcacheSelector":
        return PqcacheSelector(self, view)


class PqcacheSelector:
    """Top-K by the group's summed softmax over approximate logits."""

    def __init__(self, prepared: PreparedPqcache, view: ContextView):
        self._prepared, self._view = prepared, view
        self._tail = AppendedRows(prepared.codes)

    @property
    def search_bytes(self) -> int:
        return self._prepared.index_bytes + self._tail.rows.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row(self._prepared.encode(torch.from_numpy(k)[:, None])[:, 0])

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        centroids = self._prepared.centroids
        num_kv_heads, num_subspaces = centroids.shape[:2]
        grouped = torch.from_numpy(q).view(num_kv_heads, -1, centroids.shape[3] * num_subspaces)
        codes = joined(self._prepared.codes, self._tail.rows).long()
        logits = torch.zeros(num_kv_heads, grouped.shape[1], codes.shape[1], dtype=torch.float32)
        for b, part in enumerate(split_parts(grouped, num_subspaces)):
            products = part @ centroids[:, b].transpose(1, 2)  # [num_kv_heads, group_size, num_centroids]
            logits += products.gather(2, codes[:, None, :, b].expand(-1, grouped.shape[1], -1))
        return top_rows(softmax_group_scores(logits * self._view.softmax_scale), self._view)


def split_parts(x: Tensor, num_subspaces: int) -> Tensor:
    """[num_heads, num_rows, head_dim] -> [num_subspaces, num_heads, num_rows, subspace_dim]."""
    return x.reshape(*x.shape[:2], num_subspaces, -1).permute(2, 0, 1, 3)
