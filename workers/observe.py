"""Look at what a step attended to, beside what full attention would have: for evaluation and plots."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.selectors import FarRows
from workers.decode import LayerDecoder

NUM_BINS = 128  # stretches of the context whose reads are counted together


class AttentionProbe:
    """Sums over observed tokens, per layer and KV head; an `Observer` for `Session.request`.

    It reads all keys, as full attention does: observe every so many tokens only.
    """

    def __init__(self, artifact: Artifact, every: int = 1):
        """artifact: whose KV, as it was built, says what full attention would have been."""
        shape = (artifact.spec.model.num_layers, artifact.spec.model.num_kv_heads)
        self._artifact = artifact
        self.recall: NDArray[np.float64] = np.zeros(shape)  # share of the exact Top-K rows attended to
        self.mass: NDArray[np.float64] = np.zeros(shape)  # softmax weight of the rows attended to
        self.error: NDArray[np.float64] = np.zeros(shape)  # |out - full out| / |full out|
        self.fetched: NDArray[np.float64] = np.zeros(shape)  # rows besides the resident ones, each once for a group
        self.reads: NDArray[np.float64] = np.zeros((*shape, NUM_BINS))  # share of a stretch's rows attended to
        self._seen: NDArray[np.int64] = np.zeros(shape[0], dtype=np.int64)
        self._every = every

    def mean(self, sums: NDArray[np.float64]) -> float:
        """Mean over tokens, layers and heads of one of the sums."""
        return float(self.per_head(sums).mean())

    def per_head(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over tokens of one of the sums, per layer and KV head."""
        seen = np.maximum(self._seen, 1).reshape(-1, *[1] * (sums.ndim - 1))
        return np.asarray(sums / seen)

    def __call__(self, layer: LayerDecoder, q: Tensor, chosen: list[FarRows], out: Tensor) -> None:
        first_token = layer.tail.num_rows - q.shape[1]
        for i in range(-first_token % self._every, q.shape[1], self._every):
            self._look(layer, q[:, i], chosen[i], out[:, i], first_token + i)

    def _look(self, layer: LayerDecoder, q: Tensor, chosen: FarRows, out: Tensor, token: int) -> None:
        """q, out: [num_q_heads, head_dim] of one token of the tail."""
        context_len, layer_idx = layer.view.context_len, layer.layer_idx
        # Two parts, because copying the context together with the tail would cost more than attending to it.
        parts = self._artifact.layer_kv(layer_idx), layer.tail.kv[:, : token + 1]
        kv_len = context_len + token + 1
        grouped = q.reshape(parts[0].shape[0], -1, q.shape[-1])
        logits = torch.cat([grouped @ kv[:, :, 0].transpose(1, 2) for kv in parts], dim=2) * layer.view.softmax_scale
        weights = logits.softmax(-1)
        want = weights[:, :, :context_len] @ parts[0][:, :, 1] + weights[:, :, context_len:] @ parts[1][:, :, 1]
        resident = _resident_mask(layer, token, kv_len)
        fetched = _fetched_mask(chosen, q.shape[0], kv_len).view_as(weights)
        attended = fetched | resident
        indexed = context_len + layer.oldest_resident(token)
        best = _exact_rows(logits[..., :indexed].softmax(-1), resident[:indexed], layer.view.top_k)
        self.fetched[layer_idx] += fetched.any(1).sum(-1).numpy()
        self.mass[layer_idx] += (weights * attended).sum(-1).mean(1).numpy()
        self.error[layer_idx] += ((out.view_as(want) - want).norm(dim=-1) / want.norm(dim=-1)).mean(1).numpy()
        self.recall[layer_idx] += attended.gather(2, best).float().mean((1, 2)).numpy() if best.shape[2] else 1.0
        reads = attended[:, :, :context_len].float().mean(1, keepdim=True)
        self.reads[layer_idx] += torch.nn.functional.adaptive_avg_pool1d(reads, NUM_BINS)[:, 0].numpy()
        self._seen[layer_idx] += 1


def _exact_rows(weights: Tensor, resident: Tensor, top_k: int) -> Tensor:
    """Rows that exact Top-K would fetch: [num_kv_heads, group_size, at most top_k], the same for a whole group.

    weights: [num_kv_heads, group_size, num_rows] over the rows that a selector knows of.
    """
    worth = weights.sum(1).masked_fill(resident, -1)
    best = worth.topk(min(top_k, int((~resident).sum())), dim=1).indices
    return best[:, None].expand(-1, weights.shape[1], -1)


def _fetched_mask(chosen: FarRows, num_q_heads: int, kv_len: int) -> Tensor:
    """Which rows were fetched for each query head: [num_q_heads, kv_len] bool."""
    mask = torch.zeros(num_q_heads, kv_len, dtype=torch.bool)
    if isinstance(chosen, slice):
        mask[:, chosen] = True
        return mask
    num_index_heads = chosen.kv_indices.shape[0]
    by_head = mask.view(num_index_heads, -1, kv_len)
    for head in range(num_index_heads):
        by_head[head][:, torch.from_numpy(chosen.kv_indices[head, : chosen.valid_len[head]]).long()] = True
    return mask


def _resident_mask(layer: LayerDecoder, token: int, kv_len: int) -> Tensor:
    """Which rows are resident when that token of the tail attends: [kv_len] bool."""
    view, mask = layer.view, torch.zeros(kv_len, dtype=torch.bool)
    mask[: view.middle.start] = True
    mask[view.middle.stop : view.context_len] = True
    mask[view.context_len + layer.oldest_resident(token) : view.context_len + token + 1] = True
    return mask
