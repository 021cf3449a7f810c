"""Compare what a step attended to with what full attention would have, for evaluation and plots."""

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.attention import join_sinks
from workers.engine.fidelity import Seen, compare

NUM_BINS = 128  # stretches of the context; reads are counted per stretch


class AttentionProbe:
    """An `Observer` that sums over the observed tokens, per layer and KV head.

    Observing a token reads all keys, as full attention does; therefore only one of `every` tokens is observed.
    """

    def __init__(self, artifact: Artifact, every: int = 1):
        """artifact: its KV, as built, gives the full attention to compare with."""
        self._kv = artifact.indexed_kv()
        shape = (len(self._kv), artifact.spec.model.num_kv_heads)
        self.recall: NDArray[np.float64] = np.zeros(shape)  # share of the exact Top-K rows attended to
        self.mass: NDArray[np.float64] = np.zeros(shape)  # softmax weight of the rows attended to
        self.error: NDArray[np.float64] = np.zeros(shape)  # |out - full out| / |full out|
        self.fetched: NDArray[np.float64] = np.zeros(shape)  # rows besides the resident ones, once per GQA group
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

    def __call__(self, seen: Seen) -> None:
        if (seen.tail.shape[1] - 1) % self._every:
            return
        layer_idx, context_len = seen.layer_idx, seen.view.context_len
        context = self._kv[layer_idx]
        compared = compare(seen, context)
        parts = (compared.weights[:, :, :context_len], context), (compared.weights[:, :, context_len:], seen.tail)
        want = sum(weights @ rows[:, :, 1].float() for weights, rows in parts)
        assert isinstance(want, torch.Tensor) and seen.out is not None
        if seen.sinks is not None:
            want = join_sinks(want, compared.lse, seen.sinks.view(compared.lse.shape))
        error = (seen.out.view_as(want) - want).norm(dim=-1) / want.norm(dim=-1)
        reads = compared.attended[:, :, :context_len].float().mean(1, keepdim=True)
        self.recall[layer_idx] += compared.recall.numpy()
        self.mass[layer_idx] += compared.mass.numpy()
        self.error[layer_idx] += error.mean(1).numpy()
        self.fetched[layer_idx] += compared.fetched.any(1).sum(-1).numpy()
        self.reads[layer_idx] += torch.nn.functional.adaptive_avg_pool1d(reads, NUM_BINS)[:, 0].numpy()
        self._seen[layer_idx] += 1
