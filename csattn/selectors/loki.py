"""Loki (arXiv:2406.02542): scores in the first principal components of the keys.

As published: a basis per layer and head, a quarter of its components, exact attention to the best rows. Otherwise: the
basis is that of this context's own keys after RoPE (the paper: calibrated on another text, before or after), which can
only help it; and a row's group score is the sum over the group's query heads of its softmax share.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.exact import logits_of
from csattn.selectors.top_rows import RowsSoFar, group_shares, top_rows


class PreparedLoki:
    """The basis [num_kv_heads, head_dim, num_components] float32, and the keys in it, in the KV's dtype."""

    def __init__(self, layer: ContextLayer, num_components: int | None = None):
        """num_components: a quarter of head_dim unless said."""
        head_dim = layer.keys.shape[2]
        num_components = num_components or max(1, head_dim // 4)
        self.basis = torch.stack([_principal_components(keys)[:, :num_components] for keys in layer.keys])
        rotated = layer.keys.float() @ self.basis
        self.keys = rotated.to(layer.keys.dtype)  # [num_kv_heads, context_len, num_components]

    @property
    def index_bytes(self) -> int:
        """The paper keeps whole rotated keys in place of the keys, so that only the basis comes on top."""
        num_kv_heads, head_dim, _ = self.basis.shape
        return num_kv_heads * head_dim * head_dim * self.keys.itemsize

    def selector(self, view: ContextView) -> "LokiSelector":
        return LokiSelector(self, view)


class LokiSelector:
    """Top-K by the group's summed softmax over truncated products."""

    def __init__(self, prepared: PreparedLoki, view: ContextView):
        self._prepared, self._view = prepared, view
        self._tail = RowsSoFar(prepared.keys)

    @property
    def search_bytes(self) -> int:
        return self._prepared.keys.nbytes + self._tail.rows.nbytes

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        self._tail = self._tail.with_row((torch.from_numpy(k)[:, None] @ self._prepared.basis)[:, 0])

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        basis = self._prepared.basis
        grouped = torch.from_numpy(q).view(basis.shape[0], -1, basis.shape[1]) @ basis
        rotated = grouped.reshape(q.shape[0], -1).numpy()
        return top_rows(
            group_shares(logits_of(rotated, self._prepared.keys, self._tail.rows, self._view.softmax_scale)), self._view
        )


def _principal_components(keys: Tensor) -> Tensor:
    """Columns by falling variance. keys: [context_len, head_dim] -> [head_dim, head_dim] float32."""
    centred = keys.double() - keys.double().mean(0)
    vectors: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors
    return vectors.flip(1).float()
